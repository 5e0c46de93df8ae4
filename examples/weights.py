"""Weights from a trainer of three ranks that hold rows to a reader of two that hold columns."""

import asyncio

import torch
from monarch.actor import Actor, concurrent_endpoint, this_host, this_proc
from monarch.spmd import setup_torch_elastic_env_async
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from goaly.weights.publisher import Publisher
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import pull_into


class Rank(Actor):
    @concurrent_endpoint
    async def train(self, store: WeightStore) -> None:
        rows = distribute_tensor(torch.arange(24.0).reshape(4, 6), init_device_mesh("cpu", (3,)), [Shard(0)])
        self.publisher = Publisher(store, {"weight": rows})
        for version in range(3):
            rows.to_local().add_(100)
            await self.publisher.publish(version)

    @concurrent_endpoint
    async def close(self) -> None:
        await self.publisher.close()  # until then, versions can be read

    @concurrent_endpoint
    async def read(self, store: WeightStore) -> str:
        columns = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(1)])
        version = await pull_into(store, {"weight": columns})
        return f"has version {version}: {columns.to_local().tolist()}"


async def main() -> None:
    store = this_proc().spawn("weights", WeightStore)
    meshes = [this_host().spawn_procs(per_host={"procs": ranks}) for ranks in (3, 2)]
    await asyncio.gather(*map(setup_torch_elastic_env_async, meshes))
    trainer, reader = (mesh.spawn("rank", Rank) for mesh in meshes)
    await trainer.train.call(store)
    for rank, said in enumerate((await reader.read.call(store)).values()):
        print(f"reader rank {rank} {said}")
    await trainer.close.call()
    await asyncio.gather(*(mesh.stop() for mesh in meshes))


if __name__ == "__main__":
    asyncio.run(main())

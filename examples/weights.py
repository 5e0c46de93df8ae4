"""Weights from a trainer that holds rows to a reader that holds columns: `python examples/weights.py`."""

import asyncio
import sys

import cloudpickle
import torch
from monarch.actor import Actor, concurrent_endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from goaly.weights import WeightSettings, WeightStore, publish, pull_into

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes can't import this file


class Rank(Actor):
    @concurrent_endpoint
    async def train(self, store: WeightStore, versions: int) -> None:
        mesh = init_device_mesh("cpu", (2,))  # FSDP's layout: each rank has two of four rows
        weight = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])
        self.publishing = publish(store, {"weight": weight})
        publisher = await self.publishing.__aenter__()  # the memory stays until the process ends
        for version in range(versions):
            weight.to_local().add_(100)
            await publisher.publish(version)

    @concurrent_endpoint
    async def read(self, store: WeightStore) -> tuple[int, list[list[float]]]:
        mesh = init_device_mesh("cpu", (2,))  # a tensor-parallel layout: each rank has three of six columns
        weight = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
        version = await pull_into(store, {"weight": weight})
        return version, weight.to_local().tolist()


async def main() -> None:
    meshes = [this_host().spawn_procs(per_host={"procs": count}) for count in (1, 2, 2)]
    hub, trainer_mesh, reader_mesh = meshes
    for mesh in (trainer_mesh, reader_mesh):
        await setup_torch_elastic_env_async(mesh)
    store = hub.spawn("weights", WeightStore, WeightSettings())
    await trainer_mesh.spawn("trainer", Rank).train.call(store, 3)
    for rank, (version, columns) in enumerate((await reader_mesh.spawn("reader", Rank).read.call(store)).values()):
        print(f"reader rank {rank} has version {version}: {columns}")
    await asyncio.gather(*(mesh.stop() for mesh in meshes))


if __name__ == "__main__":
    asyncio.run(main())

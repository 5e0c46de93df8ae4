"""Weights between real processes: 2 trainer ranks on gloo, two readers at tp=1 or one at tp=2."""

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from monarch.actor import Actor, ActorError, concurrent_endpoint, this_proc
from monarch.spmd import setup_torch_elastic_env
from spawned import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from goaly.weights import torchstore
from goaly.weights.dtensor_layout import local
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import Subscriber
from tests.program import ended

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the spawned processes can't import this file

SMALL = {"embedding": (33, 16), "wqkv": (48, 16), "wo": (16, 24), "norm": (16,)}
LARGE = {"embedding": (3001, 64), "wqkv": (512, 192), "wo": (192, 384), "norm": (192,)}
PLACEMENTS = {
    "fsdp": {"embedding": Shard(0), "wqkv": Shard(0), "wo": Shard(0), "norm": Shard(0)},
    "tp": {"embedding": Shard(0), "wqkv": Shard(0), "wo": Shard(1), "norm": Replicate()},
}
pytestmark = pytest.mark.timeout(240)  # the first test waits for four processes to import torch
numbers = itertools.count()


def numbered(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every element of every tensor different from all others."""
    begin = 1000 * list(SMALL).index(name)
    return torch.arange(begin, begin + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class Rank(Actor):
    """One process of a trainer or a generator: tensors in some layout, and a publisher or a subscriber over them."""

    @concurrent_endpoint
    async def hold(self, layout: str | None, shapes: dict[str, tuple[int, ...]]) -> None:
        """Hold zeros, laid out over all processes of the mesh; None: each process holds all."""
        torch.set_num_threads(1)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized():
            await asyncio.to_thread(dist.init_process_group, "gloo")
        self.tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        if layout is not None:
            mesh = init_device_mesh("cpu", (self.world,))
            placed = PLACEMENTS[layout]
            self.tensors = {n: distribute_tensor(zero, mesh, [placed[n]]) for n, zero in self.tensors.items()}

    @concurrent_endpoint
    async def write_to(self, store: WeightStore, settings: WeightSettings) -> None:
        """Become a writer."""
        self.publisher = Publisher(store, self.tensors, settings, rank=self.rank, world=self.world)

    @concurrent_endpoint
    async def read_from(
        self, store: WeightStore, dtype: torch.dtype, settings: WeightSettings, host: str | None
    ) -> None:
        """Become a reader, with tensors of this type; on that host, if one is named."""
        with torch.no_grad():
            self.tensors = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in self.tensors.items()}
        self.subscriber = Subscriber(store, self.tensors, f"reader{self.rank}", settings, host=host)

    @concurrent_endpoint
    async def join(self) -> None:
        """Say what this rank needs."""
        await self.subscriber.join()

    @concurrent_endpoint
    async def read_and_needed(self, store: WeightStore, transport: str) -> tuple[int, int]:
        """Bytes of all buckets that it reads of a version, and of what it needs."""
        sources = await store.sources.call_one("elsewhere", transport, self.subscriber._writers)
        read = [
            sum(source.layout[piece].bytes for piece in source.buckets[bucket])
            for source, planned in zip(sources, self.subscriber._plan, strict=True)
            for bucket in planned
        ]
        return sum(read), sum(local(tensor).nbytes for tensor in self.tensors.values())

    @concurrent_endpoint
    async def publish_numbered(self, version: int) -> bool:
        """Publish numbers x (version + 1)."""
        for name, tensor in self.tensors.items():
            whole = numbered(name, tuple(tensor.shape)) * (version + 1)
            if isinstance(tensor, DTensor):
                whole = local(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
            local(tensor).copy_(whole)
        return await self.publisher.publish(version)

    @concurrent_endpoint
    async def publish_tagged(self, versions: int) -> None:
        """Publish this many versions, as fast as it goes; every element of version v is v."""
        for version in range(versions):
            for tensor in self.tensors.values():
                local(tensor).fill_(version)
            await self.publisher.publish(version)

    @concurrent_endpoint
    async def newest(self, after: int) -> int:
        """Wait for a version."""
        return await self.subscriber.newest(after)

    @concurrent_endpoint
    async def prefetch(self, version: int) -> bool:
        """Copy it into the buffers."""
        return await self.subscriber.prefetch(version)

    @concurrent_endpoint
    async def apply(self) -> set[float]:
        """Put it in place; which values the parameters have then."""
        self.subscriber.apply()
        return self.values()

    @concurrent_endpoint
    async def follow(self, last: int, pulls_each: int) -> tuple[int, int]:
        """Pull every version that can be had, some more than once, up to the last; (pulls, torn pulls)."""
        version, pulls, torn = -1, 0, 0
        while version < last:
            version = await self.subscriber.newest(version)
            for _ in range(1 + version % pulls_each):
                assert await self.subscriber.prefetch(version), "what `newest` returned is held"
                self.subscriber.apply()
                pulls += 1
                torn += self.values() != {float(version)}
        return pulls, torn

    def values(self) -> set[float]:
        """The different values of all local elements, by their least and greatest."""
        return {float(edge) for tensor in self.tensors.values() for edge in torch.aminmax(local(tensor))}

    @concurrent_endpoint
    async def whole(self) -> dict[str, torch.Tensor]:
        """All tensors, gathered."""
        gathered = {}
        for name, tensor in self.tensors.items():
            full = await asyncio.to_thread(tensor.full_tensor) if isinstance(tensor, DTensor) else tensor
            gathered[name] = full.detach().clone()
        return gathered


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[Any]]:
    """Two trainer processes and two generator processes."""
    meshes = [spawn("reference", 2) for _ in range(2)]
    for mesh in meshes:
        setup_torch_elastic_env(mesh)
    yield meshes
    for stopped in [mesh.stop() for mesh in meshes]:
        stopped.get()


@pytest.fixture(scope="module")
def ranks(meshes: list[Any]) -> tuple[Any, Any]:
    """An actor in each of them."""
    trainer, generator = (mesh.spawn(f"ranks_{next(numbers)}", Rank) for mesh in meshes)
    return trainer, generator


@pytest.fixture(scope="module", params=["auto", "rdma", "torchstore"])
def transport(request: pytest.FixtureRequest, meshes: list[Any]) -> Iterator[str]:
    """Each transport; TorchStore where it is installed."""
    if request.param != "torchstore":
        yield request.param
        return
    pytest.importorskip("torchstore")
    asyncio.run(torchstore.start(meshes[0]))
    yield request.param
    asyncio.run(torchstore.close())


async def joined_with_store(
    ranks: tuple[Any, Any],
    source: str,
    destination: str | None,
    *,
    shapes: dict[str, tuple[int, ...]] = SMALL,
    dtype: torch.dtype = torch.float32,
    settings: WeightSettings | None = None,
    host: str | None = None,
) -> tuple[Any, Any, Any]:
    """Trainer and generator ranks over a store of their own, and that."""
    settings = settings or WeightSettings()
    store = this_proc().spawn(f"weights_{next(numbers)}", WeightStore, settings)
    trainer, generator = ranks
    await asyncio.gather(trainer.hold.call(source, shapes), generator.hold.call(destination, shapes))
    await asyncio.gather(trainer.write_to.call(store, settings), generator.read_from.call(store, dtype, settings, host))
    return trainer, generator, store


async def joined(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Trainer and generator ranks over a store of their own."""
    trainer, generator, _ = await joined_with_store(*args, **kwargs)
    return trainer, generator


@pytest.mark.parametrize("destination", [None, "tp"], ids=["tp1", "tp2"])
@pytest.mark.parametrize("source", ["fsdp", "tp"])
async def test_shards_arrive_in_the_generators_layout(ranks, source: str, destination: str | None) -> None:
    trainer, generator = await joined(ranks, source, destination)
    for version in range(2):
        published = await trainer.publish_numbered.call(version)
        assert sorted(published.values()) == [False, True]
        assert all(v == version for v in (await generator.newest.call(version - 1)).values())
        assert all((await generator.prefetch.call(version)).values())
        await generator.apply.call()
        for arrived in (await generator.whole.call()).values():
            for name, tensor in arrived.items():
                assert torch.equal(tensor, numbered(name, SMALL[name]) * (version + 1)), name


async def test_matrices_are_cast_on_the_way(ranks) -> None:
    settings = WeightSettings(transfer_dtype="bfloat16")
    trainer, generator = await joined(ranks, "fsdp", "tp", dtype=torch.float32, settings=settings)
    await trainer.publish_numbered.call(0)
    await generator.newest.call(-1)
    await generator.prefetch.call(0)
    await generator.apply.call()
    for arrived in (await generator.whole.call()).values():
        for name, tensor in arrived.items():
            published = numbered(name, SMALL[name])
            assert torch.equal(tensor, published.bfloat16().float() if published.ndim > 1 else published), name


async def read_whole_while_published(trainer: Any, generator: Any, versions: int) -> None:
    """The trainer publishes these versions, two readers follow at their own pace, and no pull is torn."""
    one, two = (generator.slice(procs=number) for number in (0, 1))
    _, *read = await asyncio.gather(
        trainer.publish_tagged.call(versions),
        one.follow.call_one(versions - 1, 1),
        two.follow.call_one(versions - 1, 3),
    )
    assert [torn for _, torn in read] == [0, 0]
    assert min(pulls for pulls, _ in read) >= 2


async def test_readers_see_whole_versions_of_many_buckets_while_the_trainer_publishes(ranks, transport: str) -> None:
    versions = 10 if transport == "torchstore" else 40  # two calls of it for each bucket
    settings = WeightSettings(bucket_mib=0.1, transport=transport)
    trainer, generator = await joined(ranks, "fsdp", "tp", shapes=LARGE, settings=settings)
    await read_whole_while_published(trainer, generator, versions)


async def publish_and_follow(trainer: Any, generator: Any, version: int) -> None:
    """The trainer publishes the version; every reader pulls it and then holds exactly its numbers."""
    await trainer.publish_numbered.call(version)
    assert set((await generator.newest.call(version - 1)).values()) == {version}
    assert all((await generator.prefetch.call(version)).values())
    await generator.apply.call()
    for arrived in (await generator.whole.call()).values():
        for name, tensor in arrived.items():
            assert torch.equal(tensor, numbered(name, LARGE[name]) * (version + 1)), name


@pytest.mark.parametrize("destination", [None, "tp"], ids=["tp1", "tp2"])
async def test_every_transport_brings_each_version_to_readers_elsewhere_and_refuses_one_that_is_gone(
    ranks, transport: str, destination: str | None
) -> None:
    settings = WeightSettings(bucket_mib=0.05, slots=2, transport=transport)
    host = None if transport == "auto" else "elsewhere"
    trainer, generator = await joined(ranks, "fsdp", destination, shapes=LARGE, settings=settings, host=host)
    for version in range(3):
        await publish_and_follow(trainer, generator, version)
    assert not any((await generator.prefetch.call(0)).values())


@pytest.mark.parametrize("transport", ["rdma", "torchstore"], indirect=True)
@pytest.mark.parametrize("in_time", [True, False])
async def test_who_reads_whole_buckets_reads_what_it_needs_if_it_joined_before_the_first_publish_and_works_if_not(
    ranks, transport: str, in_time: bool
) -> None:
    settings = WeightSettings(bucket_mib=0.05, transport=transport)
    trainer, generator, store = await joined_with_store(
        ranks, "fsdp", "tp", shapes=LARGE, settings=settings, host="elsewhere"
    )
    if in_time:
        await generator.join.call()
    await trainer.publish_numbered.call(0)
    await generator.newest.call(-1)
    assert all((await generator.prefetch.call(0)).values())
    await generator.apply.call()
    for arrived in (await generator.whole.call()).values():
        for name, tensor in arrived.items():
            assert torch.equal(tensor, numbered(name, LARGE[name])), name
    for read, needed in (await generator.read_and_needed.call(store, transport)).values():
        assert read == needed if in_time else read > 1.2 * needed


async def test_readers_and_ranks_that_disagree_about_where_versions_are_kept_are_told() -> None:
    store = this_proc().spawn(f"weights_{next(numbers)}", WeightStore, WeightSettings())
    publisher = Publisher(store, {"norm": torch.zeros(16)}, WeightSettings(), rank=0, world=1)
    reader = Subscriber(store, {"norm": torch.zeros(16)}, "reader", WeightSettings(transport="torchstore"))
    await publisher.publish(0)
    with pytest.raises(
        ActorError, match=r"weights\.transport=torchstore: must be the same for .* its weights in shared memory"
    ):
        await reader.prefetch(0)
    await publisher.close()


async def test_what_rank_0_waited_for_stays_for_its_peers_while_the_trainer_runs_ahead(ranks) -> None:
    versions, version = 150, -1
    settings = WeightSettings(slots=2)
    trainer, generator = await joined(ranks, "tp", "tp", shapes=LARGE, settings=settings)
    publishing = asyncio.ensure_future(trainer.publish_tagged.call(versions))
    while version < versions - 1:
        version = await generator.slice(procs=0).newest.call_one(version)
        assert all((await generator.prefetch.call(version)).values())
        applied = await generator.apply.call()
        assert all(values == {float(version)} for values in applied.values())
    await publishing


def test_the_example_runs_and_its_columns_are_the_trainers_rows(tmp_path: Path) -> None:
    ran = ended("tests.actors.example_of_forks", below=tmp_path, seconds=120)
    assert ran.returncode == 0, ran.stderr
    whole = torch.arange(24.0).reshape(4, 6) + 300
    for rank, columns in enumerate(whole.chunk(2, 1)):
        assert f"reader rank {rank} has version 2: {columns.tolist()}" in ran.stdout

"""Three thousand pulls of tagged weights, between layouts, among pauses, revoked leases, cancellations and kills: none
is mixed."""

import asyncio
import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from local_store import Gone, Life, LocalStore, as_process, meshes, sharded
from torch.distributed.device_mesh import DeviceMesh

from goaly.base.errors import WeightsError, WritersGone
from goaly.weights.dtensor_layout import local
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

SHAPES = {"a": (16, 12), "b": (6, 4), "c": (2, 2)}
PULLS_IN_A_LIFE = 300
LIVES = 5
READERS = 4
SEVERAL_BUCKETS = WeightSettings(bucket_mib=256 / (1 << 20))
"""Several buckets a rank."""
ONE_BUCKET = WeightSettings(slots=2)


def segments() -> int:
    """Segments of the weight store that this process maps."""
    return Path("/proc/self/maps").read_text().count("goaly-weights")


class Commits:
    """How many versions were committed, for copies that are slower than several of them."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = False
        self._changed = threading.Condition()

    def add(self) -> None:
        """One more."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Until there are so many more, or the life is over."""
        with self._changed:
            wanted = self._count + count
            assert self._changed.wait_for(lambda: self._ended or self._count >= wanted, 30)

    def end(self) -> None:
        """Let everyone go on."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Writers:
    """A trainer of two ranks, its tensors in rows."""

    def __init__(self, store: LocalStore, settings: WeightSettings, ranks: list[DeviceMesh]):
        self.lives = [Life() for _ in ranks]
        self.tensors = [
            {name: sharded(mesh, 0, torch.zeros(rows // 2, columns)) for name, (rows, columns) in SHAPES.items()}
            for mesh in ranks
        ]
        self.publishers = []
        for rank, tensors in enumerate(self.tensors):
            with as_process(self.lives[rank].mark):
                self.publishers.append(Publisher(store, tensors, settings, rank=rank, world=len(ranks)))

    async def publish(self, version: int, *, turns: int | None = None) -> bool:
        """Publish from all ranks; with `turns`, give it up after so many turns of the loop."""
        for tensors in self.tensors:
            for tensor in tensors.values():
                local(tensor).fill_(version)
        ranks = [asyncio.ensure_future(one.publish(version)) for one in self.publishers]
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is not None:
            for rank in ranks:
                rank.cancel()
        ends = await asyncio.gather(*ranks, return_exceptions=True)
        for end in ends:
            assert isinstance(end, bool | asyncio.CancelledError) or (turns is not None), end
        return True in ends

    async def die(self, version: int, rank: int, turns: int) -> None:
        """One rank is killed in the midst of a version."""
        for tensors in self.tensors:
            for tensor in tensors.values():
                local(tensor).fill_(version)
        ranks = [asyncio.ensure_future(one.publish(version)) for one in self.publishers]
        for _ in range(turns):
            await asyncio.sleep(0)
        self.publishers[rank]._store = Gone()
        ranks[rank].cancel()
        self.lives[rank].kill()
        await asyncio.gather(*ranks, return_exceptions=True)

    def close(self) -> None:
        for life in self.lives:
            life.kill()
        for one in self.publishers:
            one._background.end()
            if one._slots is not None:
                one._slots.close()
            one._copier._pool.shutdown()


class Reader:
    """A reader of everything, or one of two ranks with columns; joins anew whenever its process is killed."""

    def __init__(
        self, store: LocalStore, settings: WeightSettings, number: int, mesh: DeviceMesh | None, commits: Commits
    ):
        self.life = Life()
        self.commits = commits
        self.slow = self.slowed = False
        self.revoked = 0
        self.whole = {name: torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in SHAPES.items()}
        held: dict[str, torch.Tensor] = dict(self.whole)
        if mesh is not None:
            held = {n: sharded(mesh, 1, torch.full((rows, cols // 2), -1.0)) for n, (rows, cols) in SHAPES.items()}
        self.tensors = held
        with as_process(self.life.mark):
            self.subscriber = Subscriber(store, held, f"reader {number}", settings)
        self.version = -1
        self.copy = self.subscriber._copier.copy
        self.subscriber._copier.copy = self.copy_slowly

    def copy_slowly(self, pairs: list[Any]) -> None:
        """In the midst of a copy, perhaps wait for more versions than there are slots: it may be written over."""
        self.copy(pairs[: len(pairs) // 2])
        if self.slow:
            self.slow, self.slowed = False, True
            self.commits.wait_for_more(4)
        self.copy(pairs[len(pairs) // 2 :])

    async def pull(self, draw: random.Random) -> int:
        """Pull what is newer, perhaps several times; how many pulls were checked."""
        self.slow, self.slowed = draw.random() < 0.15, False
        version = await self.subscriber.newest(self.version)
        pulls = 0
        for _ in range(draw.choice((1, 2, 8, 16))):
            if not await self.subscriber.prefetch(version):
                self.revoked += self.slowed
                with pytest.raises(WeightsError, match="nothing to apply"):
                    self.subscriber.apply()
                return pulls
            if draw.random() < 0.3:
                await asyncio.sleep(0)
            assert self.subscriber.apply() == version > self.version
            for name, tensor in self.tensors.items():
                assert bool((local(tensor) == version).all()), f"{name} of version {version}: {local(tensor)}"
            pulls += 1
        self.version = version
        return pulls

    def close(self) -> None:
        self.life.kill()
        self.subscriber._background.end()
        self.subscriber._copier._pool.shutdown()


async def live(
    draw: random.Random, settings: WeightSettings, ranks: list[DeviceMesh], pulls_wanted: int
) -> tuple[int, int]:
    """A trainer's life, from its first version to the death of a rank; its readers' pulls, and those revoked."""
    store = LocalStore(settings)
    writers = Writers(store, settings, ranks)
    commits = Commits()
    pulls, revoked, newest = 0, 0, {-1}  # a version that was given up is committed all the same, if that came first

    async def read(number: int) -> None:
        nonlocal pulls, revoked
        mesh = None if number % 3 == 0 else ranks[number % 3 - 1]
        reader = Reader(store, settings, number, mesh, commits)
        pulling = None
        try:
            while True:
                pulling = asyncio.ensure_future(reader.pull(draw))
                fate = draw.random()
                if fate < 0.2:
                    for _ in range(draw.randrange(12)):
                        await asyncio.sleep(0)
                    if fate < 0.03:
                        reader.subscriber._store = Gone()
                        reader.life.kill()
                    pulling.cancel()
                try:
                    checked = await pulling
                    pulls += checked
                except asyncio.CancelledError:
                    if fate >= 0.2:
                        raise
                revoked, reader.revoked = revoked + reader.revoked, 0
                if fate < 0.03:
                    reader.close()
                    reader = Reader(store, settings, number, mesh, commits)
        finally:
            if pulling is not None:
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            reader.close()

    readers = [asyncio.ensure_future(read(number)) for number in range(READERS)]
    version = 0
    try:
        while pulls < pulls_wanted:
            committed = await writers.publish(version, turns=draw.randrange(20) if draw.random() < 0.05 else None)
            newest = {version} if committed else newest | {version}
            commits.add()
            version += 1
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            for ended in readers:
                assert not ended.done(), ended.exception()
    finally:
        commits.end()
    await writers.die(version, draw.randrange(len(ranks)), draw.randrange(15))
    late = Reader(store, settings, 99, None, commits)
    await late.pull(random.Random(0))
    state = await store.state.call_one()
    assert state.newest in newest | {version}
    assert late.version == state.versions[-1]  # a half version is not there
    late.close()
    for reader in readers:
        reader.cancel()
    for end in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(end, asyncio.CancelledError | WritersGone), end
    assert state.bytes == sum(one._slots.source("").bytes for one in writers.publishers)
    writers.close()
    calls = list(store.under_way)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not store.failures
    return pulls, revoked


@pytest.mark.parametrize("settings", [SEVERAL_BUCKETS, ONE_BUCKET], ids=["several buckets", "one bucket"])
async def test_no_pull_is_mixed_whoever_pauses_is_revoked_gives_up_or_dies(settings: WeightSettings) -> None:
    gc.collect()
    before = segments()
    with meshes(2) as ranks:
        lives = [await live(random.Random(seed), settings, ranks, PULLS_IN_A_LIFE) for seed in range(LIVES)]
    pulls, revoked = (sum(counts) for counts in zip(*lives, strict=True))
    assert pulls >= LIVES * PULLS_IN_A_LIFE
    assert revoked >= LIVES
    gc.collect()
    assert segments() <= before

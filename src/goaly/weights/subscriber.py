"""A reader's way to new weights: wait for a version, copy the rectangles it needs, then put them in place.

    version = await subscriber.newest(after=version)     # waits; the version is held until the next `newest`
    if await subscriber.prefetch(version):                # fills spare memory while the engine goes on
        subscriber.apply()                                # the engine's thread, between two steps

The ranks of a tensor-parallel replica follow their rank 0: it alone asks for `newest`, and lends its lease to the
others' `prefetch`, which ask the store nothing. Each of them tells the store beforehand what it needs (`join`).

Invariants
    WU-1  `apply` puts in place one whole version: what `prefetch` copied under one lease, bucket by bucket, each of
          them sealed with the version before and after, and the version committed. A lease that was revoked meanwhile
          matters only if the writer has begun in its place: then a seal differs, and the copy is discarded.
    WU-2  A cancelled or failed `prefetch` holds nothing and leaves nothing to apply.
    WU-3  What was prefetched is applied once: `apply` wants another `prefetch` before it.
"""

import asyncio
import os
import random
import threading
from collections.abc import Mapping

import torch

from goaly.errors import WeightsError, WritersGone
from goaly.telemetry.spans import span
from goaly.weights.arrival import Arrival
from goaly.weights.copying import Pair, gpu_of
from goaly.weights.destination import Destination
from goaly.weights.layout import Copy, plan, region
from goaly.weights.ledger import Lease
from goaly.weights.liveness import PULSE_SECONDS
from goaly.weights.mapping import Naming
from goaly.weights.member import Member, SharedTask
from goaly.weights.settings import WeightSettings
from goaly.weights.store import Ended, Joined, WeightStore
from goaly.weights.transport import SlotReader, Source, slot_reader

SEAL_SECONDS = 0.001
"""How long a reader that follows a staging waits before it looks for further sealed buckets."""

BucketPairs = dict[int, list[Pair]]


class _WrittenOver(Exception):
    """A writer has begun another version in the slot that is being copied."""

    def __init__(self, rank: int):
        super().__init__(rank)
        self.rank = rank


class Subscriber(Member):
    """One reader of the store, until it is closed or its process ends; `async with` closes it."""

    def __init__(
        self,
        store: WeightStore,
        tensors: Mapping[str, torch.Tensor],
        reader: str | None = None,
        settings: WeightSettings | None = None,
        *,
        live: Mapping[str, torch.Tensor] | None = None,
        naming: Naming | None = None,
        host: str | None = None,
    ):
        """`tensors` are the live parameters of this rank, which `apply` writes.

        If the model computes with other objects and `tensors` only describe their placement, `live` are those objects.
        `naming` says of which published tensors the tensors are made, where they have other names (`mapping.py`).
        `host` overrides the host that the process counts as.
        """
        settings = settings or WeightSettings()
        super().__init__(store, settings, gpu_of(tensors if live is None else live), host)
        self._reader = reader or f"process {os.getpid()}"
        self._transport = settings.transport
        self._destination = Destination(tensors, settings.apply, live, naming)
        self._join = SharedTask(self._joined)
        self._number: int | None = None
        self._request = 0
        self._held: Lease | None = None
        self._sources: list[SlotReader] = []
        self._plan: list[dict[int, list[Copy]]] = []
        self._pairs: dict[tuple[int, int], list[BucketPairs]] = {}
        self._ready: int | None = None
        self._spares_lock = threading.Lock()

    @property
    def held(self) -> Lease | None:
        """What `newest` took, which other ranks of the replica can borrow until it is asked again."""
        return self._held

    async def join(self) -> None:
        """Enter the store. Who has done so before the first publish gets no more than it needs from other hosts.

        The other calls do so, too; a rank that borrows leases need not, but for that.
        """
        async with self._one_at_a_time:
            await self._join()

    async def newest(self, after: int = -1, *, early: bool = False) -> int:
        """Wait for a committed version above `after`, and hold it until the next call, `release` or `close`.

        The store takes it back where this reader is so slow that other readers and the writers need all slots; then
        `prefetch` returns False, and the next `newest` returns a newer version.

        With `early`, it may be one that is still being staged; its `prefetch` then ends with its commit. Raises
        `WritersGone` once none can come any more.
        """
        async with self._one_at_a_time:
            number = await self._join()
            self._held = None
            self._request += 1
            try:
                lease: Lease | Ended = await self._store.lease_newer.call_one(
                    number, self._request, after, early
                )  # the next commit
            except asyncio.CancelledError:
                self._give_up(number)
                raise
            if isinstance(lease, Ended):
                raise WritersGone(f"no version above {after} will come: {lease.why}")
            self._held = lease
            return lease.version

    async def prefetch(self, version: int, lent: Lease | None = None) -> bool:
        """Copy the version into this rank's spare memory, for `apply`; False if it is gone, revoked or given up.

        `lent` is another reader's lease of it, which that reader has to keep as long as this call lasts.
        """
        async with self._one_at_a_time:
            await self._connect()
            if lent is not None:
                return await self._fetch(lent)
            number = await self._join()
            lease, held_before = self._held, self._held is not None and self._held.version == version
            try:
                if not held_before:
                    lease = await self._store.lease.call_one(number, self._request, version)
                there = lease is not None and await self._fetch(lease)
                if not held_before:
                    await self.release()
            except BaseException:
                self._held = None
                self._forget()  # WU-2
                self._give_up(number)
                raise
            return there

    def apply(self) -> int:
        """Put what was prefetched in place of the live parameters; its version. Not to be called within a step."""
        with self._spares_lock:
            version, self._ready = self._ready, None  # WU-3
            if version is None:
                raise WeightsError(f"reader {self._reader} has nothing to apply: `prefetch` comes first")
            with span("apply", version=version):
                self._destination.apply()
        return version

    async def release(self) -> None:
        """Hold no version any longer than this."""
        self._held = None
        if self._number is not None:
            self._request += 1
            await self._store.release.call_one(self._number, self._request)

    async def close(self) -> None:
        """Leave the store."""
        await self._join.end()
        if self._number is not None:
            await self._store.leave_reader.call_one(self._number)
            self._number = None
        self._background.end()
        for source in self._sources:
            source.close()
        self._copier.close()

    def _give_up(self, number: int) -> None:
        """Void what was asked for, without waiting: the caller is being cancelled."""
        self._request += 1
        self._store.release.broadcast(number, self._request)

    async def _joined(self) -> int:
        """Enter the store; what it knows this reader by."""
        joined: Joined = await self._store.join_reader.call_one(
            self._reader, self._process, self._transport, self._destination.needs
        )
        self._number = joined.number
        if joined.pulse:
            self._background.every(PULSE_SECONDS, lambda: self._store.pulse.call_one(reader=joined.number))
        return joined.number

    async def _connect(self) -> None:
        """Once: reach the writers' memory, plan the copies, allocate the spares."""
        if self._sources:
            return
        sources = await self._store.sources.call_one(
            self._process.host, self._transport
        )  # unblocked by the writers' first publish
        self._sources = await self._copier.run(lambda: self._connected(sources))

    def _connected(self, sources: tuple[Source, ...]) -> list[SlotReader]:
        layouts = [source.layout for source in sources]
        self._destination.allocate({shard.name for layout in layouts for shard in layout})
        bucket_of = [
            {index: number for number, bucket in enumerate(source.buckets) for index in bucket} for source in sources
        ]
        self._plan = [{} for _ in sources]
        for copy in plan(layouts, self._destination.layout):
            bucket = bucket_of[copy.source][copy.source_shard]
            self._plan[copy.source].setdefault(bucket, []).append(copy)
        return [
            slot_reader(source, sorted(buckets), transport=self._transport, host=self._process.host, device=self._gpu)
            for source, buckets in zip(sources, self._plan, strict=True)
        ]

    async def _fetch(self, lease: Lease) -> bool:
        """Fill the spares with a version that is held; False if it is given up before it is whole, or revoked."""
        arrival = Arrival(whole=lease.whole or None)
        telling = None if lease.whole else asyncio.create_task(self._tell(lease.version, arrival))
        try:
            there = await self._copier.run(lambda: self._pull(lease, arrival), stop=arrival.stop)
            if telling is not None:
                await telling
            return there
        except _WrittenOver as over:
            if await self._store.holds.call_one(lease.reader, lease.version):
                raise WeightsError(
                    f"version {lease.version} from writer rank {over.rank} was written over while reader "
                    f"{self._reader} held it"
                ) from None
            return False
        except BaseException:
            self._forget()  # WU-2: after the copy's end, which `run` waits for
            raise
        finally:
            if telling is not None:
                telling.cancel()

    async def _tell(self, version: int, arrival: Arrival) -> None:
        """Let the copying thread know how the staging ends."""
        try:
            arrival.tell(await self._store.whole.call_one(version))  # the last rank's `staged`, or a rank's failure
        finally:
            arrival.stop()

    def _pull(self, lease: Lease, arrival: Arrival) -> bool:
        with span("pull", version=lease.version, reader=self._reader) as pull:
            self._forget()
            self._destination.settle()
            ranks = [rank for rank, buckets in enumerate(self._plan) if buckets]
            first = random.randrange(max(1, len(ranks)))  # not all readers ask the same rank at once
            waiting = {rank: sorted(self._plan[rank]) for rank in ranks[first:] + ranks[:first]}
            while waiting:
                whole = arrival.whole  # asked before the seals are read: once it is whole, all are sealed
                moved = [self._take(rank, buckets, lease) for rank, buckets in waiting.items()]
                waiting = {rank: buckets for rank, buckets in waiting.items() if buckets}
                if waiting and whole:
                    raise _WrittenOver(min(waiting))
                if waiting and not any(moved) and not arrival.wait(SEAL_SECONDS):
                    return False
            if not arrival.until_told():
                return False
            for rank, buckets in enumerate(self._plan):
                seals = self._sources[rank].seals(lease.slot) if buckets else []
                if any(seals[bucket] != lease.version for bucket in buckets):
                    raise _WrittenOver(rank)
            with self._spares_lock:
                self._ready = lease.version
            pull.note(bytes=sum(shard.bytes for shard in self._destination.layout))
        return True

    def _take(self, rank: int, waiting: list[int], lease: Lease) -> bool:
        """Copy those of the waiting buckets that are sealed by now, and take them off the list; whether any was."""
        source = self._sources[rank]
        seals = source.seals(lease.slot)
        sealed = [bucket for bucket in waiting if seals[bucket] == lease.version]
        if not sealed:
            return False
        pairs = self._pairs_of(lease.slot)[rank]
        for buckets in source.fetch(lease.slot, sealed):
            self._copier.copy([pair for bucket in buckets for pair in pairs[bucket]])
        waiting[:] = [bucket for bucket in waiting if bucket not in set(sealed)]
        return True

    def _pairs_of(self, slot: int) -> list[BucketPairs]:
        """What is copied where, by writer rank and bucket."""
        key = (slot, self._destination.side)
        if key not in self._pairs:
            targets = self._destination.targets()
            self._pairs[key] = [
                {
                    bucket: [
                        (
                            region(targets[copy.shard], copy.offset, copy.shape),
                            region(source.view(slot, copy.source_shard), copy.source_offset, copy.shape),
                        )
                        for copy in copies
                    ]
                    for bucket, copies in buckets.items()
                }
                for source, buckets in zip(self._sources, self._plan, strict=True)
            ]
        return self._pairs[key]

    def _forget(self) -> None:
        with self._spares_lock:
            self._ready = None


async def pull_into(
    store: WeightStore,
    tensors: Mapping[str, torch.Tensor],
    *,
    after: int = -1,
    settings: WeightSettings | None = None,
    naming: Naming | None = None,
) -> int:
    """Wait for a version above `after` and write it into these tensors; returns its number."""
    async with Subscriber(store, tensors, settings=settings, naming=naming) as subscriber:
        while not await subscriber.prefetch(await subscriber.newest(after)):
            pass  # revoked: there is a newer one
        return subscriber.apply()

"""The reader's side: wait for a version, copy the rectangles that it needs, then put them in place.

In a tensor-parallel replica only rank 0 asks for `newest`; it lends its lease to the other ranks' `prefetch`, which
then make no call of the store. Each rank tells the store which rectangles it needs before that (`join`). A version is
copied from the writers that staged it; where those died meanwhile, `prefetch` returns False. A prefetched version is
applied once.
"""

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from goaly.base.actors import answer_of
from goaly.base.errors import WeightsError
from goaly.base.process import PULSE_SECONDS
from goaly.base.telemetry.spans import span
from goaly.weights.copier import Pair
from goaly.weights.digest import Check, Part
from goaly.weights.dtensor_layout import gpu_of
from goaly.weights.fetched_weights import FetchedWeights
from goaly.weights.layout import Shard, region
from goaly.weights.naming import Naming
from goaly.weights.reshard_plan import Copy, plan
from goaly.weights.settings import WeightSettings
from goaly.weights.slots import SlotReader, Source
from goaly.weights.store import Joined, WeightStore
from goaly.weights.store_client import SharedTask, StoreClient
from goaly.weights.transport import slot_reader
from goaly.weights.versions import Lease

logger = logging.getLogger(__name__)


class Subscriber(StoreClient):
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
        track: str | None = None,
    ):
        """`tensors` are the live parameters of this rank, which `apply` writes.

        If the model computes with other objects and `tensors` only describe their placement, `live` are those objects.
        `naming` says of which published tensors the tensors are made, where they have other names (`naming.py`).
        `host` overrides the host that the process counts as. With a `track`, `newest` gives only versions that the
        store's track was pointed to.
        """
        settings = settings or WeightSettings()
        super().__init__(store, settings, gpu_of(tensors if live is None else live), host)
        self._reader = reader or f"process {os.getpid()}"
        self._track = track
        self._transport = settings.transport
        self._fetched = FetchedWeights(tensors, live, naming, spare=settings.spare)
        self._join = SharedTask(self._joined)
        self._number: int | None = None
        self._request = 0
        self._held: Lease | None = None
        self._writers: str | None = None
        """The group of writers whose slots it reads, as in `Lease`."""
        self._sources: list[SlotReader] = []
        self._plan: list[dict[int, list[Copy]]] = []
        self._published: dict[str, Shard] = {}
        self._check: Check | None = None
        """The check of the version in the spares, if it has a digest."""
        self._parts: list[Part] = []
        self.verified_updates = 0
        """How many of the applied versions had a digest, and were found to be what was published."""
        self._ready: int | None = None
        self._spares_lock = threading.Lock()

    @property
    def held(self) -> Lease | None:
        """The lease that `newest` took. Other ranks of the replica can borrow it until the next `newest`."""
        return self._held

    async def join(self) -> None:
        """Join the store. A reader that joins before the first publish fetches only what it needs from other hosts.

        The other calls join, too, unless the lease is borrowed.
        """
        async with self._one_at_a_time:
            await self._join()

    async def newest(self, after: int = -1) -> int:
        """Wait for a committed version above `after`, and hold it until the next call, `release` or `close`.

        The store revokes the lease if this reader is so slow that other readers and the writers need all slots; then
        `prefetch` returns False, and the next `newest` returns a newer version. Raises `WritersGone` if no such version
        can come any more.
        """
        async with self._one_at_a_time:
            number = await self._join()
            self._held = None
            self._request += 1
            try:  # the next commit, or the end of the writers
                lease = await answer_of(self._store.lease_newer.call_one(number, self._request, after))
            except asyncio.CancelledError:
                self._release_soon(number)
                raise
            self._held = lease
            return lease.version

    async def prefetch(self, version: int, lent: Lease | None = None) -> bool:
        """Copy the version into this rank's spare memory, for `apply`; False if it is gone or its lease was revoked.

        `lent` is another reader's lease of it, which that reader must keep until this call has returned.
        """
        async with self._one_at_a_time:
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
                self._forget()  # weights-3
                self._release_soon(number)
                raise
            return there

    def verify_together(self, gathered: Callable[[Any], list[Any]]) -> None:
        """Verify the prefetched version if it has a digest, which the ranks of the replica have only together
        (weights-8). All of them call it, after `prefetch` and before `apply`; `gathered` gives the objects of all."""
        ranks = gathered(
            self._parts
        )  # always: another rank may have it with a digest, from writers that replaced dead ones
        if self._check is not None:
            self._check.compare(ranks)

    def apply(self) -> int:
        """Put the prefetched weights in place of the live parameters; their version. Call it between two steps."""
        with self._spares_lock:
            version, self._ready = self._ready, None
            if version is None:
                raise WeightsError(f"reader {self._reader} has nothing to apply: `prefetch` comes first")
            is_verified = self._check is not None and self._check.is_verified
            with span("apply", version=version, verified=is_verified):
                self._fetched.apply()
            self.verified_updates += is_verified
            if self._check is not None and not is_verified:
                logger.warning("%s could not be verified: its ranks don't have all weights once", self._check.where)
        return version

    async def verify_applied(self) -> None:
        """Verify that the parameters are what was fetched, if the version has a digest, after `apply` and before the
        next `prefetch`. They may be read meanwhile."""
        check = self._check
        if check is not None and (name := await self._copier.run(self._fetched.altered)):
            raise WeightsError(f"{check.where}: parameter `{name}` differs from what was fetched and verified")

    async def release(self) -> None:
        """Hold no version any more."""
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
        self.drop()

    def drop(self) -> None:
        """Free what this reader has here, when its store has died."""
        self._sources = []
        self._fetched.free()
        self._background.end()
        self._copier.close()

    def _release_soon(self, number: int) -> None:
        """Void the earlier requests without waiting: the caller is being cancelled."""
        self._request += 1
        self._store.release.broadcast(number, self._request)

    async def _joined(self) -> int:
        """Join the store; this reader's number there."""
        joined: Joined = await self._store.join_reader.call_one(
            self._reader, self._process, self._transport, self._fetched.needs, self._track
        )
        self._number = joined.number
        if joined.pulse:
            self._background.every(PULSE_SECONDS, lambda: self._store.pulse.call_one(reader=joined.number))
        return joined.number

    async def _connect(self, writers: str) -> bool:
        """Connect to the slots of these writers, plan the copies and allocate the spares, once. False if they are
        lost."""
        if self._writers == writers:
            return True
        sources = await self._store.sources.call_one(
            self._process.host, self._transport, writers
        )  # unblocked by the writers' offers, or their death
        if not sources:
            return False
        self._writers = None
        self._sources = await self._copier.run(lambda: self._connected(sources))
        self._writers = writers
        return True

    def _connected(self, sources: tuple[Source, ...]) -> list[SlotReader]:
        layouts = [source.layout for source in sources]
        self._published = {shard.name: shard for layout in layouts for shard in layout}
        if not self._fetched.layout:
            self._fetched.allocate(self._published)
        bucket_of = [
            {index: number for number, bucket in enumerate(source.buckets) for index in bucket} for source in sources
        ]
        self._plan = [{} for _ in sources]
        for copy in plan(layouts, self._fetched.layout):
            bucket = bucket_of[copy.source][copy.source_shard]
            self._plan[copy.source].setdefault(bucket, []).append(copy)
        return [
            slot_reader(source, sorted(buckets), transport=self._transport, host=self._process.host)
            for source, buckets in zip(sources, self._plan, strict=True)
        ]

    async def _fetch(self, lease: Lease) -> bool:
        """Fill the spares with a version that is held; False if its lease was revoked and its slot overwritten."""
        try:
            if not await self._connect(lease.writers):
                return False
            overwritten = await self._copier.run(lambda: self._pull(lease))
        except BaseException as error:
            self._forget()  # `run` has waited for the copy's end
            if isinstance(error, Exception) and not await self._store.holds.call_one(lease.reader, lease.version):
                return False  # the writers died during the copy
            raise
        if overwritten is None:
            return True
        if await self._store.holds.call_one(lease.reader, lease.version):
            raise WeightsError(
                f"version {lease.version} from writer rank {overwritten} was written over while reader {self._reader} "
                "held it"
            )
        return False

    def _pull(self, lease: Lease) -> int | None:
        """Copy the version into the spares; the first writer rank that has overwritten its slot meanwhile, if any."""
        with span("pull", version=lease.version, reader=self._reader) as pull:
            self._forget()
            self._fetched.settle()
            layout, targets = self._fetched.layout, self._fetched.targets()
            where, check = f"version {lease.version} at reader {self._reader}", None
            if lease.digest is not None:
                check = Check(lease.digest, layout, self._published, where)
            ranks = [rank for rank, buckets in enumerate(self._plan) if buckets]
            first = random.randrange(max(1, len(ranks)))  # readers begin at different ranks
            for rank in ranks[first:] + ranks[:first]:
                source, copies = self._sources[rank], self._plan[rank]
                for arrived in source.fetch(lease.slot, sorted(copies)):
                    here = [copy for bucket in arrived for copy in copies[bucket]]
                    pairs = [_pair(copy, targets, source, lease.slot) for copy in here]
                    self._copier.copy(pairs)
                    if check is not None:
                        for copy, (target, fetched) in zip(here, pairs, strict=True):
                            check.fetched(copy.shard, copy.offset, fetched, target)
            for rank in ranks:
                if self._sources[rank].sealed(lease.slot) != lease.version:  # weights-1
                    return rank
            parts = [] if check is None else check.parts(targets)
            if check is not None:
                check.compare([parts])
            with self._spares_lock:
                self._ready, self._check, self._parts = lease.version, check, parts
            pull.note(bytes=sum(shard.bytes for shard in layout))
        return None

    def _forget(self) -> None:
        with self._spares_lock:
            self._ready = self._check = None


def _pair(copy: Copy, targets: list[torch.Tensor], source: SlotReader, slot: int) -> Pair:
    """Where the copy goes to, and where it comes from."""
    return (
        region(targets[copy.shard], copy.offset, copy.shape),
        region(source.view(slot, copy.source_shard), copy.source_offset, copy.shape),
    )


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
        version = subscriber.apply()
        await subscriber.verify_applied()
        return version

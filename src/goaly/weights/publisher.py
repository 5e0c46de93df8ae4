"""A trainer rank's way to publish: copy its share of the weights into its ring, and tell the store.

    publisher = Publisher(store, rank, world, engine.named_tensors(), settings)
    await publisher.publish(policy_version)

All ranks publish the same versions in the same order; a version is there for readers once the last rank is done. Each
rank waits for the copy only, never for a reader.

A publish waits for one answer of the store, which commits it and says where the next one goes. What is larger than a
bucket is announced besides when its staging begins: readers fetch each bucket as soon as it is sealed.

Invariants
    WB-1  `publish` returns once the rank's shards are copied: the tensors may change from then on.
    WB-2  A publish that fails or is cancelled before the commit withdraws the version for all ranks.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch

from goaly.errors import cause_of
from goaly.telemetry.spans import span
from goaly.weights.attend import Attendants
from goaly.weights.buckets import cut
from goaly.weights.copying import Copier, Pair, gpu_of
from goaly.weights.layout import view
from goaly.weights.liveness import PULSE_SECONDS, this_process
from goaly.weights.mapping import Naming, renamed
from goaly.weights.once import Once
from goaly.weights.placement import layout_of, local
from goaly.weights.records import Membership, Staged
from goaly.weights.ring import Ring, in_dtype
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.transport import Staging, stage

if TYPE_CHECKING:
    from goaly.weights.rdma import RemoteRing


class Publisher:
    """One writer rank of the store. `tensors` are read anew at each publish; their layout must stay."""

    def __init__(
        self,
        store: WeightStore,
        rank: int,
        world: int,
        tensors: Mapping[str, torch.Tensor],
        settings: WeightSettings,
        *,
        naming: Naming | None = None,
        host: str | None = None,
    ):
        """Without a `transfer_dtype` in the settings every tensor keeps its own.

        `naming` says of which published tensors these are made, where they have other names (`mapping.py`).

        `host` says that the process counts as one of that host, whichever it runs on."""
        self._store = store
        self._rank = rank
        self._world = world
        self._tensors = dict(tensors)
        self._naming = naming or {}
        self._settings = settings
        self._process = this_process(host)
        self._gpu = gpu_of(self._tensors)
        self._copier = Copier(settings.copy_threads, self._gpu)
        self._join = Once(self._joined)
        self._ring: Staging | None = None
        self._remote: RemoteRing | None = None
        self._next_slot: int | None = None
        self._one_at_a_time = asyncio.Lock()
        self._attendants = Attendants()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def publish(self, version: int) -> bool:
        """Stage this rank's shards as `version`; True if this was the last rank and readers can have it now."""
        async with self._one_at_a_time:
            ring = await self._join()
            slot, self._next_slot = self._next_slot, None
            early = sum(shard.bytes for shard in ring.layout) > self._settings.bucket_bytes
            try:
                if slot is None:
                    slot = await self._store.begin.call_one(self._rank, version, early)  # the others' last
                    assert slot is not None
                elif early:
                    self._store.announce.broadcast(self._rank, version)
                staged_in = slot
                await self._copier.run(lambda: self._stage(ring, staged_in, version))
                staged: Staged = await self._store.staged.call_one(self._rank, version, slot)  # the others' last
            except BaseException as error:
                self._store.abandon.broadcast(self._rank, version, repr(error))  # WB-2
                raise
            self._next_slot = staged.next_slot
            return staged.committed

    async def close(self) -> None:
        """Leave the store, for all ranks' versions to come, and let no further reader in."""
        await self._join.end(cancel=True)  # it may wait for ranks that never come
        self._attendants.end()
        if self._ring is not None:
            await self._store.leave_writer.call_one(self._rank)
            await self._copier.run(self._ring.close)
            self._ring = None
        if self._remote is not None:
            await asyncio.to_thread(self._remote.drop)
        self._copier.close()

    async def _joined(self) -> Staging:
        """Enter the store with this rank's slots."""
        dtype = None if self._settings.transfer_dtype is None else getattr(torch, self._settings.transfer_dtype)
        layout = in_dtype(renamed(layout_of(self._tensors), self._naming), dtype)
        membership: Membership = await self._store.join_writer.call_one(
            self._rank, self._world, layout, self._process
        )  # unblocked by the other ranks' first publish
        pieces, buckets = cut(membership.layout, self._settings.bucket_bytes, membership.needs)
        transport = self._settings.transport
        ring = self._ring = await self._copier.run(
            lambda: stage(transport, pieces, buckets, membership.slots, self._gpu)
        )
        await self._store.offer.call_one(self._rank, ring.source(self._process.host))
        if isinstance(ring, Ring):
            self._attendants.start(self._offer_remotely(ring))
        if membership.pulse:
            self._attendants.every(PULSE_SECONDS, lambda: self._store.pulse.call_one(writer=self._rank))
        return ring

    async def _offer_remotely(self, ring: Ring) -> None:
        """Once a reader needs it: register the ring with Monarch's RDMA."""
        await self._store.wanted_remotely.call_one(self._rank)  # the first reader on another host
        from goaly.weights.rdma import RemoteRing

        try:
            self._remote = await asyncio.to_thread(RemoteRing.of, ring)
            await self._store.offer.call_one(self._rank, ring.source(self._process.host, self._remote))
        except Exception as error:  # the readers that wait for the offer get the error; this rank's own host has others
            await self._store.no_offer.call_one(self._rank, cause_of(error))
            raise

    def _stage(self, ring: Staging, slot: int, version: int) -> None:
        with span("stage", version=version, rank=self._rank) as staging:
            held = {name: local(tensor) for name, tensor in self._tensors.items()}
            views = ring.views(slot)
            ring.unseal(slot)
            for number, bucket in enumerate(ring.buckets):
                pairs: list[Pair] = []
                for index in bucket:
                    shard = ring.layout[index]
                    pairs.append((views[index], view(held, shard)))
                self._copier.copy(pairs)
                ring.seal(slot, number, version)
            staging.note(bytes=sum(shard.bytes for shard in ring.layout))

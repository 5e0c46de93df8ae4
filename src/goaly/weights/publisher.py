"""The trainer rank's side: copy its share of the weights into its slots, and report that to the store.

All ranks publish the same versions in the same order. The last rank's report commits the version for readers. A publish
waits for the rank's own copy and for one call of the store, never for a reader. The tensors may change once it returns.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from goaly.base.errors import cause_of
from goaly.base.process import PULSE_SECONDS
from goaly.base.telemetry.spans import span
from goaly.weights.buckets import cut
from goaly.weights.digest import digest_of
from goaly.weights.dtensor_layout import gpu_of, layout_of, local
from goaly.weights.layout import in_dtype, view
from goaly.weights.naming import Naming, renamed
from goaly.weights.settings import WeightSettings
from goaly.weights.slots import SHARED, Slots
from goaly.weights.store import JoinedWriter, WeightStore
from goaly.weights.store_client import SharedTask, StoreClient
from goaly.weights.transport import slot_writer
from goaly.weights.versions import Staged


class Publisher(StoreClient):
    """One writer rank of the store, until it is closed or its process ends; `async with` closes it."""

    def __init__(
        self,
        store: WeightStore,
        tensors: Mapping[str, torch.Tensor],
        settings: WeightSettings | None = None,
        *,
        rank: int | None = None,
        world: int | None = None,
        naming: Naming | None = None,
        host: str | None = None,
    ):
        """`tensors` are what this rank holds, DTensors or plain; they are read at each publish and keep their layout.

        A tensor that several ranks hold is staged by one of them. Without a `transfer_dtype` in the settings every
        tensor keeps its own. Rank and world default to RANK and WORLD_SIZE of the environment. Where readers know the
        tensors by other names, `naming` says how (`Naming`). `host` overrides the host that the process counts as.
        """
        super().__init__(store, settings or WeightSettings(), gpu_of(tensors), host)
        self._rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self._world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
        self._tensors = dict(tensors)
        self._naming = naming or {}
        self._join = SharedTask(self._joined)
        self._register = SharedTask(self._registered)
        self._slots: Slots | None = None
        self._next: tuple[int | None, bool] = (None, True)
        """The slot of the next version, if it is known, and whether that is staged with a digest."""
        self._number = -1
        """This rank's number in the store, once it has joined."""

    async def publish(self, version: int) -> bool:
        """Stage this rank's shards as `version`; True if this was the last rank and readers can have it now."""
        async with self._one_at_a_time:
            slots = await self._join()
            (slot, digests), self._next = self._next, (None, True)
            try:
                if slot is None:
                    slot, digests = await self._store.begin.call_one(self._number, version)  # the other ranks' `staged`
                digest = await self._copier.run(partial(self._stage, slots, slot, version, digests))
                # answered once the other ranks have staged it, too
                staged: Staged = await self._store.staged.call_one(self._number, version, slot, digest)
            except BaseException as error:
                self._store.abandon.broadcast(self._number, version, repr(error))  # weights-3
                raise
            self._next = staged.next_slot, staged.digests_next
            return staged.committed

    async def close(self) -> None:
        """Leave the store and accept no further reader. No rank can publish a new version after this."""
        await self._join.end(cancel=True)  # it may wait for ranks that never come
        self._background.end()
        await self._register.end()  # a thread can't be cancelled; `close` below unregisters the memory
        if self._slots is not None:
            await self._store.leave_writer.call_one(self._number)
            await self._copier.run(self._slots.close)
            self._slots = None
        self._copier.close()

    async def _joined(self) -> Slots:
        """Join the store; this rank's slots."""
        dtype = None if self._settings.transfer_dtype is None else getattr(torch, self._settings.transfer_dtype)
        layout = in_dtype(renamed(layout_of(self._tensors), self._naming), dtype)
        joined: JoinedWriter = await self._store.join_writer.call_one(
            self._rank, self._world, layout, self._process
        )  # unblocked by the other ranks' first publish
        self._number = joined.number
        pieces, buckets = cut(joined.layout, self._settings.bucket_bytes, joined.needs)

        def create() -> Slots:
            if self._slots is None:  # kept by this object also if the caller is cancelled: `close` frees it
                self._slots = slot_writer(self._settings.transport, pieces, buckets, joined.slots)
            return self._slots

        slots = await self._copier.run(create)
        await self._store.offer.call_one(self._number, slots.source(self._process.host))
        if slots.place == SHARED:
            self._background.start(self._offer_remotely(slots))
        if joined.pulse:
            self._background.every(PULSE_SECONDS, lambda: self._store.pulse.call_one(writer=self._number))
        return slots

    async def _offer_remotely(self, slots: Slots) -> None:
        """Offer the slots to processes on other hosts once a reader there needs them."""
        await self._store.wanted_remotely.call_one(self._number)  # the first reader on another host
        try:
            await self._register()
            await self._store.offer.call_one(self._number, slots.source(self._process.host))
        except Exception as error:  # the readers that wait for the offer get the error; readers on this host go on
            why = f"writer rank {self._rank} can't be reached from other hosts: {cause_of(error)}"
            await self._store.offer.call_one(self._number, replace(slots.source(self._process.host), unreachable=why))
            raise

    async def _registered(self) -> None:
        """Register the slots with Monarch's RDMA, until they are closed."""
        from goaly.weights.rdma import RemoteSlots

        slots = self._slots
        assert slots is not None
        slots.remote = await asyncio.to_thread(RemoteSlots.of, slots)

    def _stage(self, slots: Slots, slot: int, version: int, digests: bool) -> int | None:
        """Copy the shards into the slot; what they add to the version's digest, if it has one."""
        with span("stage", version=version, rank=self._rank) as staging:
            held = {name: local(tensor) for name, tensor in self._tensors.items()}
            views = slots.views(slot)
            slots.unseal(slot)  # weights-4
            for bucket in slots.buckets:
                self._copier.copy([(views[index], view(held, slots.layout[index])) for index in bucket])
            slots.seal(slot, version)
            staging.note(bytes=sum(shard.bytes for shard in slots.layout))
            return digest_of(slots.layout, views) if digests else None

"""A reader's way to new weights: wait for a version, copy the rectangles it needs, then put them in place.

    version = await subscriber.newest(after=version)     # waits; the version is held until the next `newest`
    if await subscriber.prefetch(version):                # copies into private buffers while the engine goes on
        subscriber.apply()                                # the engine's thread, between two steps: one memory copy

The ranks of a tensor-parallel replica follow their rank 0: it alone asks for `newest`, and what it holds is there for
the others' `prefetch` until it asks again.

Invariants
    WU-1  `apply` puts in place one whole version: what `prefetch` copied under one lease, its seals checked before and
          after.
    WU-2  A cancelled or failed `prefetch` holds nothing and leaves nothing to apply.
"""

import asyncio
import threading
from collections.abc import Mapping

import torch

from goaly.errors import WeightsError
from goaly.telemetry.spans import span
from goaly.weights.copying import Copier, Pair
from goaly.weights.layout import plan, region, view
from goaly.weights.liveness import this_process
from goaly.weights.placement import layout_of, local
from goaly.weights.ring import Ring
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore


class Subscriber:
    """One reader of the store. `tensors` are the live parameters of this rank, which `apply` writes."""

    def __init__(
        self,
        store: WeightStore,
        tensors: Mapping[str, torch.Tensor],
        reader: str,
        settings: WeightSettings | None = None,
    ):
        self._store = store
        self._reader = reader
        self._tensors = dict(tensors)
        self._layout = layout_of(self._tensors)
        self._copier = Copier(1 if settings is None else settings.copy_threads)
        self._number: int | None = None
        self._request = 0
        self._held: int | None = None
        self._rings: list[Ring] = []
        self._pairs: list[list[Pair]] = []
        self._buffers: list[torch.Tensor] = []
        self._ready: int | None = None
        self._buffers_lock = threading.Lock()
        self._one_at_a_time = asyncio.Lock()

    async def newest(self, after: int = -1) -> int:
        """Wait for a committed version above `after`. It can't go away before the next call, `release` or `close`."""
        async with self._one_at_a_time:
            number = await self._join()
            self._held = None
            self._request += 1
            try:
                version = await self._store.lease_newer.call_one(number, self._request, after)  # the next commit
            except asyncio.CancelledError:
                self._give_up(number)
                raise
            self._held = version
            return version

    async def prefetch(self, version: int) -> bool:
        """Copy the version into this rank's buffers, for `apply`; False if it is gone."""
        async with self._one_at_a_time:
            number = await self._join()
            await self._connect()
            held_before = self._held == version
            try:
                slot = await self._store.lease.call_one(number, self._request, version)
                if slot is None:
                    return False
                await self._copier.run(lambda: self._pull(slot, version))
            except BaseException:
                self._held = None
                self._forget_buffers()  # WU-2: after the copy's end, which `run` waits for
                self._give_up(number)
                raise
            if not held_before:
                await self.release()
            return True

    def apply(self) -> int:
        """Copy what was prefetched into the live parameters; returns its version. Not to be called within a step."""
        with self._buffers_lock:
            version = self._ready
            if version is None:
                raise WeightsError(f"reader {self._reader} has nothing to apply: `prefetch` comes first")
            with span("apply", version=version), torch.no_grad():
                held = {name: local(tensor) for name, tensor in self._tensors.items()}
                targets = [view(held, shard) for shard in self._layout]
                torch._foreach_copy_(targets, self._buffers)
        return version

    async def release(self) -> None:
        """Hold no version any longer than this."""
        self._held = None
        if self._number is not None:
            self._request += 1
            await self._store.release.call_one(self._number, self._request)

    async def close(self) -> None:
        """Leave the store."""
        if self._number is not None:
            await self._store.leave_reader.call_one(self._number)
            self._number = None
        self._copier.close()

    def _give_up(self, number: int) -> None:
        """Void what was asked for, without waiting: the caller is being cancelled."""
        self._request += 1
        self._store.release.broadcast(number, self._request)

    async def _join(self) -> int:
        if self._number is None:
            self._number = await self._store.join_reader.call_one(self._reader, this_process())
        return self._number

    async def _connect(self) -> None:
        """Once: map the writers' memory, plan the copies, allocate the buffers."""
        if self._rings:
            return
        sources = await self._store.sources.call_one()  # unblocked by the writers' first publish

        def connected() -> tuple[list[Ring], list[torch.Tensor], list[list[Pair]]]:
            copies = plan([source.layout for source in sources], self._layout)
            rings = [Ring.open(source) for source in sources]
            buffers = [torch.zeros(shard.shape, dtype=shard.dtype) for shard in self._layout]
            pairs = [
                [
                    (
                        region(buffers[copy.shard], copy.offset, copy.shape),
                        region(rings[copy.source].views(slot)[copy.source_shard], copy.source_offset, copy.shape),
                    )
                    for copy in copies
                ]
                for slot in range(rings[0].slots)
            ]
            return rings, buffers, pairs

        self._rings, self._buffers, self._pairs = await self._copier.run(connected)

    def _pull(self, slot: int, version: int) -> None:
        with span("pull", version=version, reader=self._reader) as pull:
            self._forget_buffers()
            self._check_seals(slot, version)
            self._copier.copy(self._pairs[slot])
            self._check_seals(slot, version)
            with self._buffers_lock:
                self._ready = version
            pull.note(bytes=sum(shard.bytes for shard in self._layout))

    def _forget_buffers(self) -> None:
        with self._buffers_lock:
            self._ready = None

    def _check_seals(self, slot: int, version: int) -> None:
        for rank, ring in enumerate(self._rings):
            if ring.sealed(slot) != version:
                raise WeightsError(
                    f"version {version} from writer rank {rank} was written over while reader {self._reader} held it"
                )

"""A trainer rank's way to publish: copy its share of the weights into its ring, and tell the store.

    publisher = Publisher(store, rank, world, engine.named_tensors(), settings)
    await publisher.publish(policy_version)

All ranks publish the same versions in the same order; a version is there for readers once the last rank is done. Each
rank waits for the copy only, never for a reader.

Invariants
    WB-1  `publish` returns once the rank's shards are copied: the tensors may change from then on.
    WB-2  A publish that fails or is cancelled before the commit withdraws the version for all ranks.
"""

import asyncio
from collections.abc import Mapping

import torch

from goaly.telemetry.spans import span
from goaly.weights.copying import Copier, Pair
from goaly.weights.layout import view
from goaly.weights.liveness import this_process
from goaly.weights.placement import layout_of, local
from goaly.weights.ring import UNSEALED, Ring, in_dtype
from goaly.weights.settings import WeightSettings
from goaly.weights.store import Membership, WeightStore


class Publisher:
    """One writer rank of the store. `tensors` are read anew at each publish; their layout must stay."""

    def __init__(
        self,
        store: WeightStore,
        rank: int,
        world: int,
        tensors: Mapping[str, torch.Tensor],
        settings: WeightSettings,
    ):
        self._store = store
        self._rank = rank
        self._world = world
        self._tensors = dict(tensors)
        self._dtype = None if settings.transfer_dtype is None else getattr(torch, settings.transfer_dtype)
        self._copier = Copier(settings.copy_threads)
        self._ring: Ring | None = None
        self._request = 0
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, version: int) -> bool:
        """Stage this rank's shards as `version`; True if this was the last rank and readers can have it now."""
        async with self._one_at_a_time:
            ring = self._ring or await self._join()
            self._request += 1
            try:
                slot = await self._store.begin.call_one(self._rank, self._request, version)  # the others' last publish
                await self._copier.run(lambda: self._stage(ring, slot, version))
                return await self._store.staged.call_one(self._rank, version)
            except BaseException as error:
                self._request += 1
                self._store.abandon.broadcast(self._rank, self._request, version, repr(error))  # WB-2
                raise

    async def close(self) -> None:
        """Leave the store and let no further reader in."""
        if self._ring is not None:
            await self._store.leave_writer.call_one(self._rank)
            self._ring.close()
            self._ring = None
        self._copier.close()

    async def _join(self) -> Ring:
        layout = in_dtype(layout_of(self._tensors), self._dtype)
        membership: Membership = await self._store.join_writer.call_one(
            self._rank, self._world, layout, this_process()
        )  # unblocked by the other ranks' first publish
        self._ring = await self._copier.run(lambda: Ring.create(membership.layout, membership.slots))
        await self._store.offer.call_one(self._rank, self._ring.source)
        return self._ring

    def _stage(self, ring: Ring, slot: int, version: int) -> None:
        with span("stage", version=version, rank=self._rank) as stage:
            held = {name: local(tensor) for name, tensor in self._tensors.items()}
            pairs: list[Pair] = [
                (staged, view(held, shard)) for shard, staged in zip(ring.layout, ring.views(slot), strict=True)
            ]
            ring.seal(slot, UNSEALED)
            self._copier.copy(pairs)
            ring.seal(slot, version)
            stage.note(bytes=sum(shard.bytes for shard in ring.layout))

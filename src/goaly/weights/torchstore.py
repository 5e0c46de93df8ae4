"""A ring in TorchStore, for sites that run it: its seals and buckets are entries there, and TorchStore moves the bytes.

Versions stay the weight store's: who may read which slot, and when it is written again. An entry is a writer rank's
bucket as bytes, in one slot: `goaly.<rank's token>.<slot>.<bucket>`. Its key is the same for every version in that
slot, so TorchStore writes the new version into the old one's memory: it never holds more than the slots, nothing has to
be deleted between versions, and no reader's mapping of a deleted version is left behind. Which version an entry holds
is what the slot's seals say, as in shared memory.

The entries are flat, not DTensors under their names: what several ranks hold is stored once, in `transfer_dtype`, and
the same planner as for the other transports fills any destination, renamed, fused and uneven ones included.

Invariants
    WT-1  A bucket's seal is put once the bucket is there: who reads the seal finds the version.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from goaly.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.ring import UNSEALED, SlotShape, Source, Stored
from goaly.weights.settings import NO_TORCHSTORE

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

LONGEST_MESSAGE = ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 40))
"""Monarch's limit. Where nobody has set it, TorchStore does when imported, and has all loggers print from then on."""

SEALS = 0
"""Which stretch of a slot the seals are; bucket b is stretch 1 + b."""


async def start(writers: "ProcMesh") -> None:
    """Bring up TorchStore with a volume in each of these processes, which must have their RANK; `stop` ends it.

    A program that has initialized TorchStore already must not call this.
    """
    torchstore = _package()
    await torchstore.initialize(num_storage_volumes=len(writers), strategy=torchstore.LocalRankStrategy(), mesh=writers)


async def stop() -> None:
    """End what `start` brought up."""
    await _package().shutdown()


class StoredRing:
    """The slots of one writer rank, as it fills them: one slot's memory here, from where each bucket is put."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int):
        self.layout = layout
        self.buckets = buckets
        self._slots = slots
        shape = SlotShape(layout, buckets)
        memory = torch.empty(shape.bytes, dtype=torch.uint8)
        self._views = shape.views(memory)
        self._seals = torch.full((slots, len(buckets)), UNSEALED)
        self._stretches = shape.stretches(memory)
        self._stored = Stored(prefix=f"goaly.{uuid4().hex}", bytes=slots * shape.bytes)
        for slot in range(slots):
            self.unseal(slot)

    def source(self, host: str) -> Source:
        """What readers need to reach it, wherever they are."""
        return Source(layout=self.layout, buckets=self.buckets, slots=self._slots, host=host, handle=self._stored)

    def views(self, slot: int) -> list[torch.Tensor]:
        """Where the shards are to be put, whichever the slot."""
        return self._views

    def unseal(self, slot: int) -> None:
        """Say that the slot holds nothing."""
        self._seals[slot] = UNSEALED
        self._put_seals(slot)

    def seal(self, slot: int, bucket: int, version: int) -> None:
        """Store the bucket, then say whose shards it holds (WT-1)."""
        self._put(slot, 1 + bucket, self._stretches[1 + bucket])
        self._seals[slot, bucket] = version
        self._put_seals(slot)

    def close(self) -> None:
        """Take everything out of TorchStore: who has not read it by now gets an error."""
        stretches = range(len(self._stretches)) if self.buckets else ()
        keys = [_key(self._stored, slot, stretch) for slot in range(self._slots) for stretch in stretches]
        asyncio.run(_package().delete_batch(keys))

    def _put_seals(self, slot: int) -> None:
        if self.buckets:
            self._put(slot, SEALS, self._seals[slot].view(torch.uint8))

    def _put(self, slot: int, stretch: int, held: torch.Tensor) -> None:
        asyncio.run(_package().put(_key(self._stored, slot, stretch), held))


class StoredReach:
    """Another process's slots in TorchStore, read into memory of this process."""

    def __init__(self, source: Source):
        assert isinstance(source.handle, Stored)
        self._stored = source.handle
        shape = SlotShape(source.layout, source.buckets)
        landing = torch.empty(shape.bytes, dtype=torch.uint8)  # only the pages that are read into take memory
        self._views = shape.views(landing)
        self._seals = shape.seals(landing)
        self._stretches = shape.stretches(landing)

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """Where the shard lands, whichever the slot."""
        return self._views[shard]

    def seals(self, slot: int) -> list[int]:
        """The seals, read anew."""
        if self._seals.numel():
            self._get(slot, [SEALS])
        return self._seals.tolist()

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """All of them in one request: TorchStore reads from its volumes side by side."""
        self._get(slot, [1 + bucket for bucket in buckets])
        yield buckets

    def close(self) -> None:
        """Nothing: the entries are the writer's."""

    def _get(self, slot: int, stretches: Sequence[int]) -> None:
        wanted = {_key(self._stored, slot, stretch): self._stretches[stretch] for stretch in stretches}
        try:
            asyncio.run(_package().get_batch(wanted))
        except KeyError as error:
            raise WeightsError(
                f"{min(wanted)} is not in TorchStore any more: its trainer rank left, or TorchStore was shut down"
            ) from error


def _package() -> Any:
    os.environ.setdefault(*LONGEST_MESSAGE)
    try:
        return import_module("torchstore")
    except ModuleNotFoundError as error:
        raise WeightsError(f"weights.transport=torchstore: {NO_TORCHSTORE} ({error})") from error


def _key(stored: Stored, slot: int, stretch: int) -> str:
    return f"{stored.prefix}.{slot}.{stretch}"

"""Slots in TorchStore, for sites that run it: seals and buckets are entries there, and TorchStore moves the bytes.

The weight store still decides who may read which slot and when the slot is rewritten. An entry is one bucket of a
writer rank as bytes, in one slot: `goaly.<rank's token>.<slot>.<bucket>`. Its key is the same for every version in that
slot, so TorchStore writes the new version into the old one's memory: it never holds more than the slots, and nothing
has to be deleted between versions. The slot's seals say which version an entry holds, as in shared memory.

The entries are flat buckets, not named DTensors: a shard that several ranks hold is stored once, in `transfer_dtype`,
and the planner of the other transports fills any destination from them, also renamed, fused and uneven ones.

Invariants
    WT-1  A bucket's seal is put after the bucket: a reader that reads the seal finds the version.
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
from goaly.weights.settings import NO_TORCHSTORE
from goaly.weights.transport import Slots, SlotShape, Source, Stored

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

LONGEST_MESSAGE = ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 40))
"""Monarch's limit. If it is not set, TorchStore sets it when imported and turns on all loggers' output."""

SEALS = 0
"""The seals' index among a slot's entries; bucket b has 1 + b."""


async def start(writers: "ProcMesh") -> None:
    """Start TorchStore with a volume in each of these processes, whose RANK must be set; `close` ends it.

    A program that has already initialized TorchStore must not call this.
    """
    torchstore = _package()
    await torchstore.initialize(num_storage_volumes=len(writers), strategy=torchstore.LocalRankStrategy(), mesh=writers)


async def close() -> None:
    """Shut down what `start` started."""
    await _package().shutdown()


class StoredSlots(Slots):
    """One writer rank's slots, as it fills them: all have the same memory, from which each bucket is put."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int):
        size = SlotShape(layout, buckets).bytes
        stored = Stored(prefix=f"goaly.{uuid4().hex}", bytes=slots * size)
        super().__init__(layout, buckets, [torch.empty(size, dtype=torch.uint8)] * slots, stored)
        self._stored = stored
        self._stretches = self.stretches(0)
        for slot in range(slots):
            self.unseal(slot)

    def unseal(self, slot: int) -> None:
        """Mark all buckets of the slot as holding no version."""
        super().unseal(slot)
        self._put(slot, SEALS)

    def seal(self, slot: int, bucket: int, version: int) -> None:
        """Store the bucket, then mark it as holding this version's shards (WT-1)."""
        self._put(slot, 1 + bucket)
        super().seal(slot, bucket, version)
        self._put(slot, SEALS)

    def close(self) -> None:
        """Delete everything from TorchStore; reads after this fail."""
        stretches = range(len(self._stretches))
        keys = [_key(self._stored, slot, stretch) for slot in range(self.count) for stretch in stretches]
        asyncio.run(_package().delete_batch(keys))

    def _put(self, slot: int, stretch: int) -> None:
        if self.buckets:
            asyncio.run(_package().put(_key(self._stored, slot, stretch), self._stretches[stretch]))


class StoredReader(Slots):
    """Another process's slots in TorchStore, all read into the same memory of this process."""

    def __init__(self, source: Source):
        assert isinstance(source.handle, Stored)
        size = SlotShape(source.layout, source.buckets).bytes
        landing = torch.empty(size, dtype=torch.uint8)  # only the pages that are read into take memory
        super().__init__(source.layout, source.buckets, [landing] * source.slots, source.handle)
        self._stored = source.handle
        self._stretches = self.stretches(0)

    def seals(self, slot: int) -> list[int]:
        """The seals, read anew."""
        self._get(slot, [SEALS])
        return super().seals(slot)

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """All of them in one request: TorchStore reads from its volumes in parallel."""
        self._get(slot, [1 + bucket for bucket in buckets])
        yield buckets

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

"""Slots in TorchStore, for sites that run it: seals and buckets are entries there, and TorchStore moves the bytes.

The weight store still decides who may read which slot and when it is rewritten. An entry is one bucket in one slot, as
bytes: `goaly.<rank's token>.<slot>.<bucket>`. Each version in that slot has the same key, so TorchStore writes the new
one into the old one's memory and never holds more than the slots. A bucket's seal is put after the bucket, so a reader
that reads the seal finds the version (weights-4).
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from goaly.base.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.settings import NO_TORCHSTORE
from goaly.weights.slots import STORED, Slots, SlotShape, Source

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

LONGEST_MESSAGE = ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(1 << 40))
"""Monarch's limit. If it is not set, TorchStore sets it when imported and turns on all loggers' output."""
SEAL = 0
"""The seal's index among a slot's entries; bucket b has 1 + b."""


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
    """One writer rank's slots, as it fills them: all have the same memory, from which it is put once it is full."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int):
        memory = torch.empty(SlotShape(layout, buckets).bytes, dtype=torch.uint8)
        super().__init__(layout, buckets, [memory] * slots, STORED, f"goaly.{uuid4().hex}")
        self._stretches = self.stretches(0)
        for slot in range(slots):
            self.unseal(slot)

    def unseal(self, slot: int) -> None:
        """Mark the slot as holding no version."""
        super().unseal(slot)
        self._put(slot, SEAL)

    def seal(self, slot: int, version: int) -> None:
        """Store the buckets, then mark the slot as holding this version's shards."""
        for bucket in range(len(self.buckets)):
            self._put(slot, 1 + bucket)
        super().seal(slot, version)
        self._put(slot, SEAL)

    def close(self) -> None:
        """Delete everything from TorchStore; reads after this fail."""
        stretches = range(len(self._stretches))
        keys = [_key(self.handle, slot, stretch) for slot in range(self.count) for stretch in stretches]
        asyncio.run(_package().delete_batch(keys))

    def _put(self, slot: int, stretch: int) -> None:
        asyncio.run(_package().put(_key(self.handle, slot, stretch), self._stretches[stretch]))


class StoredReader(Slots):
    """Another process's slots in TorchStore, all read into the same memory of this process."""

    def __init__(self, source: Source):
        landing = torch.empty(source.bytes // source.slots, dtype=torch.uint8)  # has the pages that are read into
        super().__init__(source.layout, source.buckets, [landing] * source.slots, STORED, source.handle)
        self._stretches = self.stretches(0)

    def sealed(self, slot: int) -> int:
        """The version that the slot holds, read anew."""
        self._get(slot, [SEAL])
        return super().sealed(slot)

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """All of them in one request: TorchStore reads from its volumes in parallel."""
        self._get(slot, [1 + bucket for bucket in buckets])
        yield buckets

    def _get(self, slot: int, stretches: Sequence[int]) -> None:
        wanted = {_key(self.handle, slot, stretch): self._stretches[stretch] for stretch in stretches}
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


def _key(prefix: str, slot: int, stretch: int) -> str:
    return f"{prefix}.{slot}.{stretch}"

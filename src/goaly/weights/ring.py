"""One writer rank's versions in shared memory: a few slots of one size, each with room for its whole layout.

A slot begins with its seals, one for each bucket of the layout: the version whose shards the bucket holds, or
`UNSEALED` while they are being written. Leases keep slots from being rewritten under a reader; by the seals a reader
whose lease was revoked finds that its copy may be torn, and a reader of an early version which buckets it may take.

Invariants
    WG-1  A bucket is sealed with a version only while every shard in it is that version's: a slot is unsealed before
          any of it is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from goaly.weights.layout import Layout
from goaly.weights.memory import Segment, SegmentHandle

UNSEALED = -1
ALIGNMENT = 64
PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where in TorchStore a writer rank's slots are (`torchstore.py`)."""

    prefix: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """That a writer rank's slots are in its device's memory, and are only read over RDMA (`rdma.DirectRing`)."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a reader must know of one writer rank: which rectangles it stages, and where."""

    layout: Layout
    buckets: tuple[range, ...]
    slots: int
    host: str
    handle: SegmentHandle | Stored | OnDevice
    remote: Any | None = None
    """The ring as processes on other hosts reach it (`rdma.RemoteRing`), if one asked for that."""


class Ring:
    """The slots of one writer rank, as their writer or one of its readers on the host sees them."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int, segment: Segment):
        self.layout = layout
        self.buckets = buckets
        self.slots = slots
        self._segment = segment
        self._shape = SlotShape(layout, buckets)
        self._slots = [
            segment.tensor(torch.uint8, (self._shape.bytes,), slot * self._shape.bytes) for slot in range(slots)
        ]
        self._views = [self._shape.views(memory) for memory in self._slots]
        self._seals = [self._shape.seals(memory) for memory in self._slots]

    @classmethod
    def create(cls, layout: Layout, buckets: tuple[range, ...], slots: int) -> "Ring":
        """The ring of this process as a writer, every slot unsealed."""
        ring = cls(layout, buckets, slots, Segment.create(slots * SlotShape(layout, buckets).bytes))
        for slot in range(slots):
            ring.unseal(slot)
        return ring

    @classmethod
    def open(cls, source: Source) -> "Ring":
        """Another process's ring, to read."""
        assert isinstance(source.handle, SegmentHandle)
        return cls(source.layout, source.buckets, source.slots, Segment.open(source.handle))

    def source(self, host: str, remote: Any | None = None) -> Source:
        """What readers need to reach it."""
        return Source(
            layout=self.layout,
            buckets=self.buckets,
            slots=self.slots,
            host=host,
            handle=self._segment.handle,
            remote=remote,
        )

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return self._segment.handle.bytes

    def stretches(self, slot: int) -> list[torch.Tensor]:
        """The slot's memory as bytes: its seals, then each bucket."""
        return self._shape.stretches(self._slots[slot])

    def views(self, slot: int) -> list[torch.Tensor]:
        """The tensors of the slot, one a shard of the layout, each contiguous."""
        return self._views[slot]

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of them."""
        return self._views[slot][shard]

    def unseal(self, slot: int) -> None:
        """Say that the slot holds nothing."""
        self._seals[slot].fill_(UNSEALED)

    def seal(self, slot: int, bucket: int, version: int) -> None:
        """Say whose shards the bucket holds."""
        self._seals[slot][bucket] = version

    def seals(self, slot: int) -> list[int]:
        """The version whose shards each bucket of the slot holds, or `UNSEALED`."""
        return self._seals[slot].tolist()

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """The buckets, at once: the memory is mapped."""
        yield buckets

    def close(self) -> None:
        """Let no further reader in; what is mapped stays."""
        self._segment.close()


class SlotShape:
    """Where in a slot's memory everything lies."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...]):
        self._layout = layout
        self._buckets = buckets
        self._seal_bytes = 8 * len(buckets)
        self._offsets, end = [], _up(self._seal_bytes, ALIGNMENT)
        for shard in layout:
            self._offsets.append(end)
            end += _up(shard.bytes, ALIGNMENT)
        self.bytes = _up(max(end, 1), PAGE)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The shards in this slot's memory."""
        return [self.view(index, memory) for index in range(len(self._layout))]

    def view(self, index: int, memory: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """A shard in memory that has the slot's bytes from `begin` on."""
        offset, shard = self._offsets[index] - begin, self._layout[index]
        return memory[offset : offset + shard.bytes].view(shard.dtype).view(shard.shape)

    def seals(self, memory: torch.Tensor) -> torch.Tensor:
        """The seals in this slot's memory."""
        return memory[: self._seal_bytes].view(torch.int64)

    def stretches(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of the seals, then those of each bucket."""
        spans = [self.span(bucket) for bucket in range(len(self._buckets))]
        return [memory[: self._seal_bytes], *(memory[span.start : span.stop] for span in spans)]

    def span(self, bucket: int) -> range:
        """Which of the slot's bytes are a bucket's."""
        is_last = bucket + 1 == len(self._buckets)
        end = self.bytes if is_last else self._offsets[self._buckets[bucket + 1].start]
        return range(self._offsets[self._buckets[bucket].start], end)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def in_dtype(layout: Layout, dtype: torch.dtype | None) -> Layout:
    """The layout with its floating-point shards in this type."""
    if dtype is None:
        return layout
    return tuple(replace(shard, dtype=dtype) if shard.dtype.is_floating_point else shard for shard in layout)

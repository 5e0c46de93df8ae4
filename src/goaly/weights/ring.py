"""One writer rank's versions in shared memory: a few slots of one size, each with room for its whole layout.

A slot begins with a seal: the version whose shards it holds, or `UNSEALED` while they are being written. Leases keep
slots from being rewritten under a reader; the seal turns a broken lease into an error rather than a torn read.

Invariants
    WG-1  A slot is sealed with a version only while every shard in it is that version's.
"""

from dataclasses import dataclass, replace

import torch

from goaly.weights.layout import Layout
from goaly.weights.memory import Segment, SegmentHandle

UNSEALED = -1
ALIGNMENT = 64
PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a reader must know of one writer rank: which rectangles it stages, and where."""

    layout: Layout
    slots: int
    handle: SegmentHandle


class Ring:
    """The slots of one writer rank, as their writer or one of their readers sees them."""

    def __init__(self, layout: Layout, slots: int, segment: Segment):
        self.layout = layout
        self.slots = slots
        self._segment = segment
        offsets, slot_bytes = _places(layout)
        placed = list(zip(layout, offsets, strict=True))
        self._views = [
            [segment.tensor(shard.dtype, shard.shape, slot * slot_bytes + offset) for shard, offset in placed]
            for slot in range(slots)
        ]
        self._seals = [segment.tensor(torch.int64, (1,), slot * slot_bytes) for slot in range(slots)]

    @classmethod
    def create(cls, layout: Layout, slots: int) -> "Ring":
        """The ring of this process as a writer, every slot unsealed."""
        ring = cls(layout, slots, Segment.create(slots * _places(layout)[1]))
        for slot in range(slots):
            ring.seal(slot, UNSEALED)
        return ring

    @classmethod
    def open(cls, source: Source) -> "Ring":
        """Another process's ring, to read."""
        return cls(source.layout, source.slots, Segment.open(source.handle))

    @property
    def source(self) -> Source:
        """What readers need to open it."""
        return Source(layout=self.layout, slots=self.slots, handle=self._segment.handle)

    def views(self, slot: int) -> list[torch.Tensor]:
        """The tensors of the slot, one a shard of the layout, each contiguous."""
        return self._views[slot]

    def seal(self, slot: int, version: int) -> None:
        """Say whose shards the slot holds."""
        self._seals[slot][0] = version

    def sealed(self, slot: int) -> int:
        """The version whose shards the slot holds, or `UNSEALED`."""
        return int(self._seals[slot][0])

    def close(self) -> None:
        """Let no further reader in; what is mapped stays."""
        self._segment.close()


def _places(layout: Layout) -> tuple[list[int], int]:
    """Where each shard begins in a slot, after the seal, and how many bytes a slot takes."""
    offsets, end = [], ALIGNMENT
    for shard in layout:
        offsets.append(end)
        end += _up(shard.bytes, ALIGNMENT)
    return offsets, _up(end, PAGE)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def in_dtype(layout: Layout, dtype: torch.dtype | None) -> Layout:
    """The layout with its floating-point shards in this type."""
    if dtype is None:
        return layout
    return tuple(replace(shard, dtype=dtype) if shard.dtype.is_floating_point else shard for shard in layout)

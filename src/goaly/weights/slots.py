"""A writer rank's slots, as every transport keeps and reads them.

A slot begins with its seal: the version that it holds, or `UNSEALED` while the writer changes it. Leases keep a slot
from being rewritten under a reader; the seal shows a reader whose lease was revoked that its copy may be torn.

    weights-4: A slot is sealed with a version only while every shard in it is that version's: it is unsealed before any
        of it is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from goaly.weights.layout import Layout

UNSEALED = -1
ALIGNMENT = 64
PAGE = 4096

SHARED, STORED = "shared memory", "TorchStore"
"""Where slots can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One writer rank as readers see it: which rectangles it stages, and where."""

    layout: Layout
    buckets: tuple[range, ...]
    slots: int
    host: str
    place: str
    """`SHARED` or `STORED`."""
    handle: Any
    """The key that opens them there: a `SegmentHandle`, or the prefix of TorchStore's keys."""
    bytes: int
    remote: Any | None = None
    """The slots as processes on other hosts reach them (`rdma.RemoteSlots`), once a reader there needs them."""
    unreachable: str | None = None
    """Why processes on other hosts can't reach them."""


class SlotReader(Protocol):
    """One writer rank's slots, as one reader reaches them. Used by one thread at a time, never by an event loop's."""

    def sealed(self, slot: int) -> int:
        """The version that the slot holds, or `UNSEALED`."""
        ...

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Make these buckets readable through `view`; yields buckets as they arrive."""
        ...

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of the slot's shards. Valid from when `fetch` yields its bucket until `fetch` is resumed."""
        ...


class SlotShape:
    """Where in a slot's memory its shards lie."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...]):
        self._layout = layout
        self._buckets = buckets
        sizes = (_round_up(shard.bytes, ALIGNMENT) for shard in layout)
        self._offsets = [*accumulate(sizes, initial=ALIGNMENT)]  # the seal comes first
        self.bytes = _round_up(self._offsets[-1], PAGE)

    def view(self, index: int, memory: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """A shard, in memory that has the slot's bytes from `begin` on."""
        offset, shard = self._offsets[index] - begin, self._layout[index]
        return memory[offset : offset + shard.bytes].view(shard.dtype).view(shard.shape)

    def span(self, bucket: int) -> range:
        """Which of the slot's bytes are a bucket's."""
        shards = self._buckets[bucket]
        return range(self._offsets[shards.start], self._offsets[shards.stop])


class Slots:
    """One writer rank's slots in memory of this process. Used by one thread at a time, never by an event loop's."""

    remote: Any | None = None

    def __init__(
        self,
        layout: Layout,
        buckets: tuple[range, ...],
        memory: Sequence[torch.Tensor],
        place: str,
        handle: Any = None,
    ):
        """`memory` has the bytes of each slot; `place` and `handle` are those of `Source`."""
        self.layout = layout
        self.buckets = buckets
        self.place = place
        self.handle = handle
        self.count = len(memory)
        """How many slots there are."""
        self._shape = SlotShape(layout, buckets)
        self._memory = memory
        self._views = [[self._shape.view(index, slot) for index in range(len(layout))] for slot in memory]
        self._seals = [slot[:8].view(torch.int64) for slot in memory]

    def source(self, host: str) -> Source:
        """The description that readers need to reach the slots."""
        return Source(
            layout=self.layout,
            buckets=self.buckets,
            slots=self.count,
            host=host,
            place=self.place,
            handle=self.handle,
            bytes=self.count * self._shape.bytes,
            remote=self.remote,
        )

    def views(self, slot: int) -> list[torch.Tensor]:
        """The slot's shards, each contiguous. A writer unseals the slot before it fills them."""
        return self._views[slot]

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of them."""
        return self._views[slot][shard]

    def unseal(self, slot: int) -> None:
        """Mark the slot as holding no version."""
        self._seals[slot].fill_(UNSEALED)

    def seal(self, slot: int, version: int) -> None:
        """Mark the slot as holding this version's shards."""
        self._seals[slot].fill_(version)

    def sealed(self, slot: int) -> int:
        """The version that the slot holds, or `UNSEALED`."""
        return int(self._seals[slot])

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """All of the buckets at once: they are in memory here."""
        yield buckets

    def stretches(self, slot: int) -> list[torch.Tensor]:
        """The slot's memory as bytes: its seal, then each bucket."""
        spans = [self._shape.span(bucket) for bucket in range(len(self.buckets))]
        memory = self._memory[slot]
        return [self._seals[slot].view(torch.uint8), *(memory[span.start : span.stop] for span in spans)]

    def close(self) -> None:
        """Accept no further reader."""
        if self.remote is not None:
            self.remote.drop()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

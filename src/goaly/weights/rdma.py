"""Slots that readers read without the writer's help: their seal and buckets as Monarch RDMA buffers.

`RemoteSlots` registers slots for readers on other hosts. Without RDMA hardware Monarch carries the same calls over TCP.

    weights-6: No read is in flight once `fetch` has ended, however it ended. Memory that a bucket landed in is read
        into again only once the caller resumes `fetch`, and never after a failed read, whose data may still arrive.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monarch.rdma import RDMABuffer

from goaly.base.errors import WeightsError
from goaly.weights.settings import IN_FLIGHT
from goaly.weights.slots import UNSEALED, Slots, SlotShape, Source


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """A writer rank's slots for readers on other hosts: by slot, the buffers of the seal and of each bucket."""

    stretches: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, slots: Slots) -> "RemoteSlots":
        """Register the slots' memory. Blocks on Monarch's manager: do not call it on an event loop."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
            return cls(tuple(tuple(map(RDMABuffer, slots.stretches(slot))) for slot in range(slots.count)))

    def drop(self) -> None:
        """Unregister the memory. Blocks on Monarch's manager: do not call it on an event loop."""
        for dropping in [buffer.drop() for stretches in self.stretches for buffer in stretches]:
            dropping.get()


class RemoteReader:
    """Another process's slots, whose buckets are read into a few landing places here, in turn."""

    def __init__(self, source: Source, wanted: Sequence[int]):
        """`wanted` are the buckets that will be fetched."""
        assert isinstance(source.remote, RemoteSlots), "the store waits until the writer has registered its slots"
        self._remote = source.remote
        self._failed: BaseException | None = None
        self._seal = torch.full((1,), UNSEALED)
        shape = SlotShape(source.layout, source.buckets)
        self._places = {bucket: order % IN_FLIGHT for order, bucket in enumerate(wanted)}
        sizes = {bucket: len(shape.span(bucket)) for bucket in wanted}
        landing = torch.empty((IN_FLIGHT, max(sizes.values(), default=0)), dtype=torch.uint8)
        self._stretches = {bucket: landing[self._places[bucket], :size] for bucket, size in sizes.items()}
        self._views = {
            index: shape.view(index, self._stretches[bucket], shape.span(bucket).start)
            for bucket in wanted
            for index in source.buckets[bucket]
        }

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """Where the shard lands, in whichever slot it is."""
        return self._views[shard]

    def sealed(self, slot: int) -> int:
        """The version that the slot holds, read anew."""
        self._check()
        read = self._remote.stretches[slot][0].read_into(self._seal.view(torch.uint8))
        self._failed = read.exception()
        self._check()
        return int(self._seal)

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Each bucket as it arrives, while the next ones are read."""
        coming: deque[tuple[int, Any]] = deque()
        self._check()
        try:
            for bucket in buckets:
                while any(self._places[other] == self._places[bucket] for other, _ in coming):  # weights-6
                    yield [self._arrived(coming)]
                read = self._remote.stretches[slot][1 + bucket].read_into(self._stretches[bucket])
                coming.append((bucket, read))
            while coming:
                yield [self._arrived(coming)]
        finally:
            while coming:  # weights-6
                self._failed = coming.popleft()[1].exception() or self._failed

    def _arrived(self, coming: deque[tuple[int, Any]]) -> int:
        bucket, read = coming.popleft()
        self._failed = read.exception()
        self._check()
        return bucket

    def _check(self) -> None:
        if self._failed is not None:  # weights-6
            raise WeightsError(f"a read from a trainer rank on another host failed: {self._failed}") from self._failed

"""A ring across hosts: its seals and buckets as Monarch RDMA buffers, which readers read without the writer's help.

Without RDMA hardware Monarch carries the same calls over TCP.

Invariants
    WX-1  No read is under way once `fetch` has ended, however it ended.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monarch.rdma import RDMABuffer

from goaly.weights.ring import Ring, SlotShape, Source

IN_FLIGHT = 4
"""Buckets that are read at a time: enough to keep sender, wire and receiver busy, while one is copied out."""


@dataclass(frozen=True, slots=True)
class RemoteRing:
    """What a process on another host needs to read a ring: by slot, the buffers of the seals and of each bucket."""

    stretches: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, ring: Ring) -> "RemoteRing":
        """Register the ring's memory. Not on an event loop: it waits for Monarch's manager."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
            return cls(
                tuple(
                    tuple(RDMABuffer(stretch) for stretch in ring.stretches(slot)) if ring.buckets else ()
                    for slot in range(ring.slots)
                )
            )


class RemoteReach:
    """A ring on another host, read into memory of this process."""

    def __init__(self, source: Source):
        assert isinstance(source.remote, RemoteRing), "the store waits until the writer has registered its ring"
        self._remote = source.remote
        shape = SlotShape(source.layout, source.buckets)
        landing = torch.empty(shape.bytes, dtype=torch.uint8)  # only the pages that are read into take memory
        self._views = shape.views(landing)
        self._seals = shape.seals(landing)
        self._stretches = shape.stretches(landing)

    def views(self, slot: int) -> list[torch.Tensor]:
        """Where the shards land, whichever the slot."""
        return self._views

    def seals(self, slot: int) -> list[int]:
        """The seals, read anew."""
        if not self._remote.stretches[slot]:
            return []
        self._read(slot, 0).get()
        return self._seals.tolist()

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Each bucket as it arrives, while the next ones are read."""
        coming: deque[tuple[int, Any]] = deque()
        try:
            for bucket in buckets:
                if len(coming) == IN_FLIGHT:
                    yield [_arrived(coming)]
                coming.append((bucket, self._read(slot, 1 + bucket)))
            while coming:
                yield [_arrived(coming)]
        finally:
            while coming:  # WX-1
                coming.popleft()[1].exception()

    def close(self) -> None:
        """Nothing: the buffers are the writer's."""

    def _read(self, slot: int, stretch: int) -> Any:
        return self._remote.stretches[slot][stretch].read_into(self._stretches[stretch])


def _arrived(coming: deque[tuple[int, Any]]) -> int:
    bucket, read = coming.popleft()
    read.get()
    return bucket

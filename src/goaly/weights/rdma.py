"""Slots that readers read without the writer's help: their seals and buckets as Monarch RDMA buffers.

`RemoteSlots` registers slots for readers on other hosts. Without RDMA hardware Monarch carries the same calls over TCP.
`DeviceSlots` keeps the slots in the memory of the GPU that has the tensors; between GPUs, weights then pass through no
host's memory.

Readers on one host that need the same buckets are neighbours. The first that asks the store for a version pulls it into
its `Mirror`, from which the others copy it. A neighbour that finds the mirror gone, or sealed with another version,
pulls the version itself. A mirror's buckets are sealed as those of a writer (weights-4).

    weights-6: No read is in flight once `fetch` has ended, however it ended. Memory that a bucket landed in is read
        into again only once the caller resumes `fetch`, and never after a failed read, whose data may still arrive.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from monarch.rdma import RDMABuffer, is_ibverbs_available

from goaly.base.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.settings import IN_FLIGHT
from goaly.weights.shared_memory import Ring, SegmentHandle
from goaly.weights.slots import DEVICE, UNSEALED, SlotReader, Slots, SlotShape, Source


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """A writer rank's slots for readers on other hosts: by slot, the buffers of the seals and of each bucket."""

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


class DeviceSlots(Slots):
    """One writer rank's slots in a GPU's memory; their seals are in host memory."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int, device: torch.device):
        """Blocks on Monarch's manager: do not call it on an event loop."""
        if device.type == "cuda" and not is_ibverbs_available():
            raise WeightsError(
                "weights.transport=direct: must be auto, shm or rdma here: this process finds no RDMA device (ibverbs) "
                "that could read a GPU's memory"
            )
        size = SlotShape(layout, buckets).bytes
        memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        super().__init__(layout, buckets, memory, DEVICE)
        self._seals = list(torch.full((slots, len(buckets)), UNSEALED))
        self.remote = RemoteSlots.of(self)


class RemoteReader:
    """Another process's slots, whose buckets are read into a few landing places here, in turn, or into a mirror."""

    def __init__(
        self, source: Source, wanted: Sequence[int], device: torch.device | None = None, mirror: Ring | None = None
    ):
        """`wanted` are the buckets that will be fetched; they land in the memory of `device`, or in the mirror."""
        assert isinstance(source.remote, RemoteSlots), "the store waits until the writer has registered its slots"
        self._remote = source.remote
        self._failed: BaseException | None = None
        self._seals = torch.full((len(source.buckets),), UNSEALED)
        self._mirror = mirror
        shape = SlotShape(source.layout, source.buckets)
        self._places = {bucket: order % IN_FLIGHT for order, bucket in enumerate(wanted)}
        if mirror is None:
            sizes = {bucket: len(shape.span(bucket)) for bucket in wanted}
            landing = torch.empty((IN_FLIGHT, max(sizes.values(), default=0)), dtype=torch.uint8, device=device)
            self._stretches = {bucket: landing[self._places[bucket], :size] for bucket, size in sizes.items()}
        else:
            stretches = mirror.stretches(0)
            self._stretches = {bucket: stretches[1 + bucket] for bucket in wanted}
        self._views = {
            index: shape.view(index, self._stretches[bucket], shape.span(bucket).start)
            for bucket in wanted
            for index in source.buckets[bucket]
        }

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """Where the shard lands, in whichever slot it is."""
        return self._views[shard]

    def seals(self, slot: int) -> list[int]:
        """The seals, read anew."""
        self._check()
        read = self._remote.stretches[slot][0].read_into(self._seals.view(torch.uint8))
        self._failed = read.exception()
        self._check()
        return self._seals.tolist()

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Each bucket as it arrives, while the next ones are read."""
        coming: deque[tuple[int, Any]] = deque()
        self._check()
        if self._mirror is not None:
            self._mirror.unseal(0)  # weights-4
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


class Mirror:
    """One reader's mirror of all writer ranks, and that of the neighbour from which it copied last.

    A mirror is a ring of one slot with room for the needed buckets alone; a reader without neighbours allocates none.
    """

    def __init__(self, sources: Sequence[Source], wanted: Sequence[tuple[int, ...]]):
        """`wanted` are the buckets that the reader needs of each source."""
        self.wanted = tuple(wanted)
        self._sources = sources
        self._kept = [_kept(source, buckets) for source, buckets in zip(sources, wanted, strict=True)]
        self._own: list[Ring] = []
        self._readers: list[SlotReader] = []
        self._neighbours: tuple[tuple[SegmentHandle, ...], list[SlotReader]] = ((), [])

    def readers(self) -> list[SlotReader]:
        """Readers of the sources that read into the own mirror, which the first call allocates."""
        if not self._own:
            self._own = [Ring.create(kept.layout, kept.buckets, kept.slots) for kept in self._kept]
            parts = zip(self._sources, self.wanted, self._own, strict=True)
            self._readers = [RemoteReader(source, wanted, mirror=ring) for source, wanted, ring in parts]
        return self._readers

    def seal(self, version: int) -> tuple[SegmentHandle, ...]:
        """Mark the own mirror as holding this version; the handles by which neighbours open it."""
        for ring, wanted in zip(self._own, self.wanted, strict=True):
            for bucket in wanted:
                ring.seal(0, bucket, version)  # weights-4
        return tuple(ring.handle for ring in self._own)

    def neighbours(self, handles: tuple[SegmentHandle, ...]) -> list[SlotReader]:
        """A neighbour's mirror, or an empty list if the neighbour is gone. Only the last one is kept mapped."""
        if handles != self._neighbours[0]:
            self._neighbours = ((), [])
            try:
                parts = zip(self._kept, handles, strict=True)
                rings = [Ring.open(replace(kept, handle=handle)) for kept, handle in parts]
            except WeightsError:
                return []
            self._neighbours = (handles, rings)
        return self._neighbours[1]

    def close(self) -> None:
        """Let no more neighbours copy."""
        for ring in self._own:
            ring.close()


def _kept(source: Source, wanted: tuple[int, ...]) -> Source:
    """The source as a mirror has it: in one slot, with room for the shards of the needed buckets alone."""
    kept = {shard for bucket in wanted for shard in source.buckets[bucket]}
    layout = tuple(shard if index in kept else replace(shard, shape=(0,)) for index, shard in enumerate(source.layout))
    return replace(source, layout=layout, slots=1)

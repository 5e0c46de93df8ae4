"""Versions of writers on another host, in memory that the readers of one host share: one pulls, its neighbours copy.

Neighbours are readers on one host that need the same buckets. The first that asks the store for a version pulls it into
its mirror, a ring of one slot with room for these buckets alone; a reader without neighbours has none. A neighbour that
finds the mirror gone, or sealed with another version, pulls the version itself.

Invariants
    WH-1  A mirror's bucket is sealed with a version only while it is that version's, as the check after the pull found:
          all are unsealed before any is read into.
"""

from collections.abc import Sequence
from dataclasses import replace

from goaly.errors import WeightsError
from goaly.weights.rdma import RemoteReader
from goaly.weights.shared_memory import Ring, Segment
from goaly.weights.transport import SegmentHandle, SlotReader, Source


class Mirror:
    """One reader's mirror of all writer ranks, and that of the neighbour from which it copied last."""

    def __init__(self, sources: Sequence[Source], wanted: Sequence[tuple[int, ...]]):
        """`wanted` are the buckets that the reader needs of each source."""
        self.wanted = tuple(wanted)
        self._sources = sources
        self._own: list[Ring] = []
        self._neighbours: tuple[tuple[SegmentHandle, ...], list[SlotReader]] = ((), [])

    def create(self) -> list[SlotReader]:
        """Readers of the sources that read into the own mirror, which is allocated."""
        self._own = [self._ring(rank) for rank in range(len(self._sources))]
        parts = zip(self._sources, self.wanted, self._own, strict=True)
        return [RemoteReader(source, wanted, mirror=ring) for source, wanted, ring in parts]

    @property
    def exists(self) -> bool:
        """Whether the own mirror is allocated."""
        return bool(self._own)

    def seal(self, version: int) -> tuple[SegmentHandle, ...]:
        """Mark the own mirror as holding this version; the handles by which neighbours open it."""
        for ring, wanted in zip(self._own, self.wanted, strict=True):
            for bucket in wanted:
                ring.seal(0, bucket, version)  # WH-1
        return tuple(ring.handle for ring in self._own)

    def neighbours(self, handles: tuple[SegmentHandle, ...]) -> list[SlotReader]:
        """A neighbour's mirror, or an empty list if the neighbour is gone. Only the last one is kept mapped."""
        if handles != self._neighbours[0]:
            self._neighbours = ((), [])
            try:
                rings = [self._ring(rank, Segment.open(handle)) for rank, handle in enumerate(handles)]
            except WeightsError:
                return []
            self._neighbours = (handles, rings)
        return self._neighbours[1]

    def close(self) -> None:
        """Let no more neighbours copy."""
        for ring in self._own:
            ring.close()

    def _ring(self, rank: int, segment: Segment | None = None) -> Ring:
        """A ring of one slot, new or in a segment, with room for the shards of the needed buckets alone."""
        source = self._sources[rank]
        kept = {shard for bucket in self.wanted[rank] for shard in source.buckets[bucket]}
        layout = tuple(
            shard if index in kept else replace(shard, shape=(0,)) for index, shard in enumerate(source.layout)
        )
        return Ring(layout, source.buckets, 1, segment) if segment else Ring.create(layout, source.buckets, 1)

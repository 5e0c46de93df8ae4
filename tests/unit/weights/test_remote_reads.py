"""Reads over the network, some of which fail."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from goaly.base.errors import WeightsError
from goaly.weights.buckets import cut
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.rdma import RemoteReader, RemoteSlots
from goaly.weights.shared_memory import Ring
from goaly.weights.slots import SHARED, UNSEALED, Source

LAYOUT, BUCKETS = cut(layout_of({name: torch.zeros(16) for name in "abcdef"}), 64)
WANTED = list(range(len(BUCKETS)))


class Read:
    """A read that ends when it is waited for."""

    under_way: ClassVar[list["Read"]] = []

    def __init__(self, memory: torch.Tensor, target: torch.Tensor, *, lost: bool):
        self._memory, self.target, self._lost = memory, target, lost
        self.under_way.append(self)

    def exception(self) -> Exception | None:
        self.under_way.remove(self)
        if self._lost:
            return TimeoutError("no answer")
        self.target.copy_(self._memory)
        return None


class Buffer:
    """A stretch of another process's memory; `lost` are reads of it that fail."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        self.lost = 0

    def read_into(self, target: torch.Tensor) -> Read:
        assert all(read.target.data_ptr() != target.data_ptr() for read in Read.under_way)
        self.lost -= (lost := self.lost > 0)
        return Read(self._memory, target, lost=lost)


@pytest.fixture
def buffers() -> Iterator[tuple[tuple[Buffer, ...], ...]]:
    """Those of a ring of two slots; in the first, each shard is filled with its number."""
    ring = Ring.create(LAYOUT, BUCKETS, 2)
    for number, view in enumerate(ring.views(0)):
        view.fill_(number)
    ring.seal(0, 7)
    yield tuple(tuple(Buffer(stretch) for stretch in ring.stretches(slot)) for slot in range(2))
    ring.close()
    assert not Read.under_way  # weights-6


def source(buffers: tuple[tuple[Buffer, ...], ...]) -> Source:
    remote = RemoteSlots(buffers)
    return Source(
        layout=LAYOUT, buckets=BUCKETS, slots=2, host="elsewhere", place=SHARED, handle=None, bytes=0, remote=remote
    )


def test_what_was_fetched_stays_until_the_next_is_asked_for_and_nothing_is_read_after_the_end(buffers) -> None:
    reader = RemoteReader(source(buffers), WANTED)
    assert [reader.sealed(slot) for slot in (0, 1, 0)] == [7, UNSEALED, 7]
    fetching = reader.fetch(0, WANTED)
    for bucket in WANTED[:2]:
        assert next(fetching) == [bucket]
        assert float(reader.view(0, bucket)[0]) == bucket  # weights-6
        assert Read.under_way
    fetching.close()
    assert not Read.under_way  # weights-6


def test_after_a_read_that_failed_nothing_is_read_into_that_memory(buffers) -> None:
    reader = RemoteReader(source(buffers), WANTED)
    found = [float(reader.view(0, shard)[0]) for buckets in reader.fetch(0, WANTED) for shard in buckets]
    assert found == [0, 1, 2, 3, 4, 5]

    buffers[0][2].lost = 1
    with pytest.raises(WeightsError, match="failed: no answer"):
        list(reader.fetch(0, WANTED))
    with pytest.raises(WeightsError, match="failed: no answer"):  # weights-6
        list(reader.fetch(0, WANTED))
    with pytest.raises(WeightsError, match="failed: no answer"):
        reader.sealed(0)
    assert list(RemoteReader(source(buffers), WANTED).fetch(0, WANTED)) == [[bucket] for bucket in WANTED]

"""Reads over the network, some of which fail."""

import pytest
import torch

from goaly.errors import WeightsError
from goaly.weights.buckets import buckets_of
from goaly.weights.layout import Layout
from goaly.weights.memory import SegmentHandle
from goaly.weights.placement import layout_of
from goaly.weights.rdma import RemoteReach, RemoteRing
from goaly.weights.ring import Ring, Source

LAYOUT: Layout = layout_of({name: torch.zeros(16) for name in "abcdef"})
BUCKETS = buckets_of(LAYOUT, 64)


class Read:
    """A read that has ended."""

    def __init__(self, error: Exception | None):
        self._error = error

    def exception(self) -> Exception | None:
        return self._error


class Buffer:
    """A stretch of another process's memory; `lost` are reads of it that fail."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory
        self.lost = 0

    def read_into(self, target: torch.Tensor) -> Read:
        if self.lost:
            self.lost -= 1
            return Read(TimeoutError("no answer"))
        target.copy_(self._memory)
        return Read(None)


def test_after_a_read_that_failed_nothing_is_read_into_that_memory() -> None:
    ring = Ring.create(LAYOUT, BUCKETS, 2)
    for number, view in enumerate(ring.views(0)):
        view.fill_(number)
    buffers = tuple(tuple(Buffer(stretch) for stretch in ring.stretches(slot)) for slot in range(2))
    handle = SegmentHandle(pid=0, descriptor=0, inode=0, bytes=0)
    remote = RemoteRing(buffers)
    source = Source(layout=LAYOUT, buckets=BUCKETS, slots=2, host="elsewhere", handle=handle, remote=remote)
    wanted = list(range(len(BUCKETS)))

    reach = RemoteReach(source, wanted)
    found = [float(reach.view(0, shard)[0]) for buckets in reach.fetch(0, wanted) for shard in buckets]
    assert found == [0, 1, 2, 3, 4, 5]

    buffers[0][2].lost = 1
    with pytest.raises(WeightsError, match="failed: no answer"):
        list(reach.fetch(0, wanted))
    with pytest.raises(WeightsError, match="failed: no answer"):  # WX-3
        list(reach.fetch(0, wanted))
    with pytest.raises(WeightsError, match="failed: no answer"):
        reach.seals(0)
    assert list(RemoteReach(source, wanted).fetch(0, wanted)) == [[bucket] for bucket in wanted]
    ring.close()

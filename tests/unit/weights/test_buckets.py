"""Cutting a layout into buckets changes nothing but the grain: WK-1, WK-2; and each goes the way its hosts demand."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.errors import WeightsError
from goaly.weights.buckets import buckets_of, cut
from goaly.weights.layout import region
from goaly.weights.liveness import SilenceWatch
from goaly.weights.placement import layout_of
from goaly.weights.transport import crosses

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=5)


@given(shapes=shapes, limit=st.integers(1, 200))
def test_the_pieces_of_a_layout_cover_each_element_once_in_order_within_the_limit(shapes, limit: int) -> None:
    tensors = {str(number): torch.zeros(shape) for number, shape in enumerate(shapes)}
    layout = layout_of(tensors)
    pieces = cut(layout, limit)
    for piece in pieces:
        region(tensors[piece.name], piece.start, piece.shape).add_(1)
        assert piece.offset == piece.start
        assert piece.bytes <= limit or piece.shape[:1] == (1,) or piece.elements == max(piece.shape, default=1) == 1
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    assert [piece.name for piece in pieces] == sorted((piece.name for piece in pieces), key=int)
    buckets = buckets_of(pieces, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(pieces)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(pieces[index].bytes for index in bucket) <= limit


def test_a_matrix_is_cut_by_rows() -> None:
    (layout,) = [layout_of({"w": torch.zeros(5, 4)})]
    assert [(piece.offset, piece.shape) for piece in cut(layout, 32)] == [
        ((0, 0), (2, 4)),
        ((2, 0), (2, 4)),
        ((4, 0), (1, 4)),
    ]
    assert [len(bucket) for bucket in buckets_of(cut(layout, 32), 48)] == [1, 1, 1]
    assert [len(bucket) for bucket in buckets_of(cut(layout, 32), 400)] == [3]


def test_only_pairs_on_different_hosts_cross_the_network_unless_told_otherwise() -> None:
    assert not crosses("auto", "a", "a")
    assert crosses("auto", "a", "b")
    assert crosses("rdma", "a", "a")
    assert not crosses("shm", "a", "a")
    with pytest.raises(WeightsError, match=r"weights\.transport=shm: must be auto or rdma"):
        crosses("shm", "a", "b")


async def test_a_process_elsewhere_counts_as_ended_once_it_is_silent_and_not_while_its_pulse_beats() -> None:
    ended = asyncio.Event()
    watch = SilenceWatch(ended.set, seconds=0.05)
    deadline = asyncio.get_running_loop().time() + 0.15
    while asyncio.get_running_loop().time() < deadline:
        watch.beat()
        await asyncio.sleep(0)
    assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 10)
    watch.close()

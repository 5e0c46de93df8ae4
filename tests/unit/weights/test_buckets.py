"""Buckets are cut to what readers need; and each goes the way its hosts demand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_store import LocalStore

from goaly.base.process import this_process
from goaly.weights.buckets import Needs, cut, needs_of
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.layout import Extent, Rectangle, joined, region
from goaly.weights.settings import WeightSettings
from goaly.weights.store import JoinedWriter
from goaly.weights.transport import reads_whole_buckets

Shapes = dict[str, Extent]


@st.composite
def rectangles(draw: st.DrawFn, shape: Extent) -> Rectangle:
    """Some part of a tensor of this shape."""
    edges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return tuple(begin for begin, _ in edges), tuple(end - begin for begin, end in edges)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shapes, list[Needs]]:
    """Tensors, and what up to three readers need of them."""
    shapes = {str(n): tuple(draw(st.lists(st.integers(1, 7), max_size=3))) for n in range(draw(st.integers(0, 4)))}
    needs = [
        {
            name: tuple(draw(st.lists(rectangles(shape), max_size=2)))
            for name, shape in shapes.items()
            if draw(st.booleans())
        }
        for _ in range(draw(st.integers(0, 3)))
    ]
    return shapes, needs


@given(problem=problems(), limit=st.integers(1, 200))
def test_pieces_cover_each_element_once_within_the_limit(problem, limit: int) -> None:
    shapes, needs = problem
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    pieces, buckets = cut(layout_of(tensors), limit, needs)
    for piece in pieces:
        region(tensors[piece.name], piece.start, piece.shape).add_(1)
        assert piece.offset == piece.start
        assert piece.bytes <= limit or piece.elements == 1
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    assert [index for bucket in buckets for index in bucket] == list(range(len(pieces)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(pieces[index].bytes for index in bucket) <= limit


@given(problem=problems(), limit=st.integers(1, 2000))
def test_each_reader_needs_all_of_a_bucket_or_nothing_of_it(problem, limit: int) -> None:
    shapes, needs = problem
    layout = layout_of({name: torch.zeros(shape) for name, shape in shapes.items()})
    pieces, buckets = cut(layout, limit, needs)
    for one in needs:
        wanted = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
        for name, parts in one.items():
            for part in parts:
                region(wanted[name], *part).fill_(True)
        for bucket in buckets:
            found = [region(wanted[pieces[n].name], pieces[n].start, pieces[n].shape).flatten() for n in bucket]
            assert len(torch.cat(found).unique()) == 1


def test_a_matrix_is_cut_by_rows_and_what_is_too_long_for_one_piece_by_columns() -> None:
    layout = layout_of({"w": torch.zeros(5, 4)})
    by_rows, buckets = cut(layout, 32)
    assert [(piece.offset, piece.shape) for piece in by_rows] == [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (1, 4))]
    assert [len(bucket) for bucket in buckets] == [1, 1, 1]
    by_both, _ = cut(layout_of({"w": torch.zeros(2, 4)}), 12)
    assert [(piece.offset, piece.shape) for piece in by_both] == [
        ((0, 0), (1, 3)),
        ((0, 3), (1, 1)),
        ((1, 0), (1, 3)),
        ((1, 3), (1, 1)),
    ]


def test_only_small_pieces_share_a_bucket() -> None:
    sizes = {"a": 9, "b": 10, "c": 9, "d": 10}
    pieces, buckets = cut(layout_of({name: torch.zeros(size) for name, size in sizes.items()}), 320)
    assert [[pieces[n].name for n in bucket] for bucket in buckets] == [["a", "c"], ["b"], ["d"]]


def test_readers_of_columns_have_buckets_of_their_own_and_share_those_of_what_all_need() -> None:
    layout = layout_of({"norm": torch.zeros(4), "wo": torch.zeros(2, 4), "bias": torch.zeros(3)})
    small: Needs = {"norm": (((0,), (4,)),), "bias": (((0,), (3,)),)}
    halves: list[Needs] = [small | {"wo": (((0, begin), (2, 2)),)} for begin in (0, 2)]
    pieces, buckets = cut(layout, 1000, halves)
    assert [[(pieces[n].name, pieces[n].offset, pieces[n].shape) for n in bucket] for bucket in buckets] == [
        [("norm", (0,), (4,)), ("bias", (0,), (3,))],
        [("wo", (0, 0), (2, 2))],
        [("wo", (0, 2), (2, 2))],
    ]


def test_a_reader_that_is_wrong_about_a_tensors_shape_spoils_no_buckets() -> None:
    layout = layout_of({"w": torch.zeros(4, 4)})
    wrong: Needs = {"w": (((0,), (2,)),), "unheard of": (((0,), (2,)),)}
    assert cut(layout, 1000, [wrong]) == cut(layout, 1000)


@given(shape=st.lists(st.integers(1, 5), max_size=3).map(tuple), limit=st.integers(4, 100))
def test_what_a_reader_has_in_touching_pieces_it_needs_as_one_rectangle(shape: Extent, limit: int) -> None:
    pieces, _ = cut(layout_of({"w": torch.zeros(shape)}), limit)
    assert needs_of(pieces) == {"w": ((tuple(0 for _ in shape), shape),)}


@given(parts=st.lists(rectangles((4, 5)), max_size=4))
def test_joined_rectangles_have_the_elements_that_they_had(parts: list[Rectangle]) -> None:
    before, after = torch.zeros(4, 5), torch.zeros(4, 5)
    for mask, having in ((before, parts), (after, joined(parts))):
        for part in having:
            region(mask, *part).fill_(1)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("host", "transport", "told"),
    [
        ("", "auto", False),
        ("elsewhere", "auto", True),
        ("", "rdma", True),
        ("", "torchstore", True),
    ],
)
async def test_writers_are_told_what_readers_of_whole_buckets_need_that_joined_before_them(
    host: str, transport: str, told: bool
) -> None:
    store, here = LocalStore(WeightSettings()), this_process()
    needs: list[Needs] = [{"w": (((0, begin), (4, 2)),)} for begin in (0, 2)]
    for one in (*needs, *needs):  # two replicas
        await store.join_reader.call_one("reader", this_process(host), transport, one)
    gone = await store.join_reader.call_one("gone", this_process(host), transport, {"w": (((0, 0), (4, 1)),)})
    await store.leave_reader.call_one(gone.number)
    layout = layout_of({"w": torch.zeros(4, 4)})
    member: JoinedWriter = await store.join_writer.call_one(0, 1, layout, here)
    assert member.needs == (tuple(needs) if told else ())
    await store.join_reader.call_one("late", this_process(host), transport, {"w": (((0, 0), (4, 3)),)})
    assert await store.join_writer.call_one(0, 1, layout, here) == member
    await store.leave_writer.call_one(0)


def test_only_pairs_on_different_hosts_cross_the_network_unless_told_otherwise() -> None:
    assert not reads_whole_buckets("auto", "a", "a")
    assert reads_whole_buckets("auto", "a", "b")
    assert reads_whole_buckets("rdma", "a", "a")

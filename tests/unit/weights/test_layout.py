"""Layouts and plans: WL-1, WL-2, and agreement with torch's own reading of placements."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from goaly.errors import WeightsError
from goaly.weights import layout as layout_module
from goaly.weights.layout import Layout, plan, region, share
from goaly.weights.placement import layout_of, shards_of

Meshed = tuple[tuple[int, ...], tuple]


@st.composite
def meshes(draw: st.DrawFn, dims: int) -> Meshed:
    """A mesh of one to three axes, and the placement of a tensor of `dims` dims on each."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    choices = [Replicate(), *(Shard(dim) for dim in range(dims))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh]
    if dims and len(mesh) == 2 and draw(st.booleans()):  # FSDP and TP on one dim, as FSDP2 places it
        dim = draw(st.integers(0, dims - 1))
        placements = [_StridedShard(dim, split_factor=mesh[1]), Shard(dim)]
    return mesh, tuple(placements)


@st.composite
def problems(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], Meshed, Meshed]]:
    """Tensors, each with its placement on the sources' and on the destinations' mesh."""
    tensors = []
    source_mesh = destination_mesh = None
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        source, destination = draw(meshes(len(shape))), draw(meshes(len(shape)))
        source_mesh, destination_mesh = source_mesh or source[0], destination_mesh or destination[0]
        if source[0] != source_mesh:
            source = (source_mesh, tuple(Replicate() for _ in source_mesh))
        if destination[0] != destination_mesh:
            destination = (destination_mesh, tuple(Replicate() for _ in destination_mesh))
        tensors.append((f"tensor{index}", shape, source, destination))
    return tensors


def layouts(tensors, side: int) -> list[Layout]:
    mesh = tensors[0][side][0]
    return [
        tuple(
            shard
            for name, shape, *sides in tensors
            for shard in shards_of(name, torch.float32, shape, mesh, coordinate, sides[side - 2][1])
        )
        for coordinate in product(*(range(ranks) for ranks in mesh))
    ]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape)


def filled(sources: list[Layout], destination: Layout) -> list[torch.Tensor]:
    """The destination's rectangles after the plan's copies; an element that was written twice is NaN."""
    received = [torch.full(shard.shape, -1.0, dtype=torch.float64) for shard in destination]
    for copy in plan(sources, destination):
        whole = sources[copy.source][copy.source_shard]
        held = region(numbered(whole.global_shape), whole.offset, whole.shape)
        target = region(received[copy.shard], copy.offset, copy.shape)
        target.copy_(torch.where(target == -1, region(held, copy.source_offset, copy.shape), torch.nan))
    return received


@settings(deadline=None, max_examples=150)
@given(problems())
def test_a_plan_fills_every_destination_element_once_from_its_own_source(tensors) -> None:
    sources = layouts(tensors, 2)
    for held in (sources, list(share(sources))):
        for destination in layouts(tensors, 3):
            for shard, received in zip(destination, filled(held, destination), strict=True):
                assert torch.equal(received, region(numbered(shard.global_shape), shard.offset, shard.shape))


@st.composite
def placed_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Meshed]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return shape, draw(meshes(len(shape)))


@settings(deadline=None, max_examples=200)
@given(placed_tensors())
def test_rectangles_are_what_torch_puts_on_each_rank(case) -> None:
    shape, (mesh, placements) = case
    for coordinate in product(*(range(ranks) for ranks in mesh)):
        on_rank = numbered(shape)
        for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
            if not isinstance(placement, Replicate):
                on_rank = placement._split_tensor(on_rank, ranks, with_padding=False, contiguous=False)[0][rank]
        held = shards_of("w", torch.float32, shape, mesh, coordinate, placements)
        assert sum(shard.elements for shard in held) == on_rank.numel()
        for shard in held:
            expected = region(numbered(shape), shard.offset, shard.shape)
            assert torch.equal(region(on_rank, shard.start, shard.shape), expected)


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8))
def test_sources_that_hold_the_same_share_the_bytes_evenly(holders: int, shapes) -> None:
    layout = tuple(
        shard for i, shape in enumerate(shapes) for shard in shards_of(f"w{i}", torch.float32, shape, (), (), ())
    )
    sources = [layout] * holders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "SPLIT_BYTES", 64)
        shared = share(sources)
        copies = plan(sources, layout)
    staged = [sum(shard.bytes for shard in mine) for mine in shared]
    pulled = [sum(prod(copy.shape) * 4 for copy in copies if copy.source == rank) for rank in range(holders)]
    for loads, sizes in (
        (staged, [shard.bytes for mine in shared for shard in mine]),
        (pulled, [prod(copy.shape) * 4 for copy in copies]),
    ):
        assert sum(loads) == sum(shard.bytes for shard in layout)
        assert max(loads) - min(loads) <= max(sizes)


def test_two_row_halves_arrive_as_two_column_halves() -> None:
    sources = [shards_of("w", torch.float32, (4, 6), (2,), (rank,), (Shard(0),)) for rank in (0, 1)]
    right = shards_of("w", torch.float32, (4, 6), (2,), (1,), (Shard(1),))
    assert [(c.source, c.source_offset, c.offset, c.shape) for c in plan(sources, right)] == [
        (0, (0, 3), (0, 0), (2, 3)),
        (1, (0, 3), (2, 0), (2, 3)),
    ]


def test_uneven_rows_leave_the_last_rank_with_fewer_or_none() -> None:
    rows = [shards_of("w", torch.float32, (5,), (4,), (rank,), (Shard(0),)) for rank in range(4)]
    rectangles = [[(s.offset, s.shape) for s in held] for held in rows]
    assert rectangles == [
        [((0,), (2,))],
        [((2,), (2,))],
        [((4,), (1,))],
        [],
    ]


def test_a_large_replicated_rectangle_is_divided_and_a_small_one_is_not() -> None:
    large = shards_of("large", torch.float32, (1024, 1024), (), (), ())
    small = shards_of("small", torch.float32, (8,), (), (), ())
    shared = share([large + small, large + small])
    assert [[(s.name, s.offset, s.shape, s.start) for s in held] for held in shared] == [
        [("large", (0, 0), (512, 1024), (0, 0)), ("small", (0,), (8,), (0,))],
        [("large", (512, 0), (512, 1024), (512, 0))],
    ]


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("v", (4, 4), torch.float32, "`v` is held by no source; they hold `w`"),
        ("w", (4, 5), torch.float32, r"`w` has shape \(4, 5\), its sources have \(4, 4\)"),
        ("w", (4, 4), torch.int64, "`w` is torch.int64, its sources are torch.float32"),
    ],
)
def test_a_destination_that_no_source_can_fill_is_named(name, shape, dtype, said) -> None:
    with pytest.raises(WeightsError, match=said):
        plan([shards_of("w", torch.float32, (4, 4), (), (), ())], shards_of(name, dtype, shape, (), (), ()))


def test_missing_rows_are_named() -> None:
    first_half = shards_of("w", torch.float32, (4, 4), (2,), (0,), (Shard(0),))
    with pytest.raises(WeightsError, match=r"`w`: the \(2, 4\) elements at \(2, 0\) are held by no source"):
        plan([first_half], shards_of("w", torch.float32, (4, 4), (), (), ()))


def test_floating_point_types_may_differ() -> None:
    source = shards_of("w", torch.float32, (4,), (), (), ())
    assert len(plan([source], shards_of("w", torch.bfloat16, (4,), (), (), ()))) == 1


def test_partial_placements_are_refused() -> None:
    with pytest.raises(WeightsError, match="must be sharded or replicated"):
        shards_of("w", torch.float32, (4,), (2,), (0,), (Partial(),))


def test_layout_of_plain_tensors_is_the_whole_of_each() -> None:
    (held,) = layout_of({"w": torch.zeros(2, 3), "empty": torch.zeros(0, 3)})
    assert (held.name, held.offset, held.shape, held.start) == ("w", (0, 0), (2, 3), (0, 0))

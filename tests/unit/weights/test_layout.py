"""Layouts and plans: weights-11, and agreement with torch's own reading of placements."""

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from goaly.base.errors import WeightsError
from goaly.weights import reshard_plan
from goaly.weights.dtensor_layout import layout_of, shards_of
from goaly.weights.layout import Layout, Rectangle, common, region
from goaly.weights.reshard_plan import SPLIT_BYTES, plan, share

Meshed = tuple[tuple[int, ...], tuple]


@st.composite
def placements_on(draw: st.DrawFn, mesh: tuple[int, ...], dims: int) -> tuple:
    """A placement of a tensor of `dims` dims on each axis; an axis may divide what later ones left of a dim."""
    choices = [Replicate(), *(Shard(dim) for dim in range(dims))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and draw(st.booleans()):
            later = zip(mesh[axis + 1 :], placements[axis + 1 :], strict=True)
            inner = prod(ranks for ranks, other in later if other == placement)
            placements[axis] = _StridedShard(placement.dim, split_factor=inner)
    return tuple(placements)


@st.composite
def meshes(draw: st.DrawFn, dims: int) -> Meshed:
    """A mesh of one to three axes, and the placement of a tensor of `dims` dims on each."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return mesh, draw(placements_on(mesh, dims))


def experts(mesh: tuple[int, ...]) -> tuple:
    """Stacked experts on a mesh of replicas, FSDP within experts, and expert parallelism."""
    return (Replicate(), Shard(1), Shard(0))[-len(mesh) :]


@st.composite
def problems(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], Meshed, Meshed]]:
    """Tensors, each with its placement on the sources' and on the destinations' mesh; the last may be experts."""
    source_mesh, destination_mesh = (tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) for _ in range(2))
    tensors = []
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        source, destination = (
            draw(placements_on(source_mesh, len(shape))),
            draw(placements_on(destination_mesh, len(shape))),
        )
        tensors.append((f"tensor{index}", shape, (source_mesh, source), (destination_mesh, destination)))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3)))
        destination = draw(placements_on(destination_mesh, 3))
        tensors.append(("experts", shape, (source_mesh, experts(source_mesh)), (destination_mesh, destination)))
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


def on_rank(tensor: torch.Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements) -> torch.Tensor:
    """The rank's part: tensor and expert parallelism divide first, then what is strided over them, as FSDP2 does."""
    axes = list(zip(mesh, coordinate, placements, strict=True))
    first = [axis for axis in axes if isinstance(axis[2], Shard)]
    for ranks, rank, placement in first + [axis for axis in axes if isinstance(axis[2], _StridedShard)][::-1]:
        chunks = tensor.chunk(ranks, placement.dim) if tensor.shape[placement.dim] else (tensor,)
        tensor = chunks[rank] if rank < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor


@settings(deadline=None, max_examples=200)
@given(placed_tensors())
def test_rectangles_are_what_fsdp_leaves_of_the_shards_of_other_axes(case) -> None:  # weights-11
    shape, (mesh, placements) = case
    for coordinate in product(*(range(ranks) for ranks in mesh)):
        expected = on_rank(numbered(shape), mesh, coordinate, placements)
        held = shards_of("w", torch.float32, shape, mesh, coordinate, placements)
        assert sum(shard.elements for shard in held) == expected.numel()
        for shard in held:
            assert torch.equal(
                region(expected, shard.start, shard.shape), region(numbered(shape), shard.offset, shard.shape)
            )


def test_fsdp_divides_the_shards_of_tensor_parallelism_and_leaves_its_last_rank_none_of_either() -> None:  # weights-11
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    held = [shards_of("w", torch.float32, (7,), (3, 2), at, placements) for at in product(range(3), range(2))]
    assert [[(shard.offset[0], shard.shape[0]) for shard in mine] for mine in held] == [
        *([(0, 2)], [(4, 1)]),  # of rows 0 to 3 and 4 to 6
        *([(2, 2)], [(5, 1)]),
        *([], [(6, 1)]),
    ]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(2, 5))
def test_a_stride_over_nothing_is_read_as_torch_reads_it(rows: int, outer: int, inner: int, factor: int) -> None:
    placements = (_StridedShard(0, split_factor=factor), Shard(1))
    for coordinate in product(range(outer), range(inner)):
        whole = numbered((rows, 3))
        strided = placements[0]._split_tensor(whole, outer, with_padding=False, contiguous=False)[0][coordinate[0]]
        expected = placements[1]._split_tensor(strided, inner, with_padding=False, contiguous=False)[0][coordinate[1]]
        held = shards_of("w", torch.float32, (rows, 3), (outer, inner), coordinate, placements)
        assert sum(shard.elements for shard in held) == expected.numel()
        for shard in held:
            assert torch.equal(region(expected, shard.start, shard.shape), region(whole, shard.offset, shard.shape))


def granule(whole: list[Layout], shared: list[Layout], split_bytes: int) -> int:
    """What is not divided, or one index of the dim along which a larger rectangle was cut."""
    shapes = {(shard.name, shard.offset): shard.shape for layout in whole for shard in layout}
    largest = split_bytes
    for shard in (shard for layout in shared for shard in layout):
        for (name, offset), shape in shapes.items():
            ends = zip(offset, shape, shard.offset, strict=True) if name == shard.name else ()
            if name == shard.name and all(a <= c < a + n for a, n, c in ends):
                cut = [dim for dim, (n, m) in enumerate(zip(shape, shard.shape, strict=True)) if n != m]
                largest = max([largest, *(prod(shape) * 4 // shape[dim] for dim in cut)])
    return largest


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_ranks_that_hold_the_same_share_its_bytes_evenly(data) -> None:
    mesh = (data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)))
    sources: list[Layout] = [() for _ in range(prod(mesh))]
    shapes = data.draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple), max_size=12))
    for index, shape in enumerate(shapes):
        placements = (Replicate(), *data.draw(placements_on(mesh[1:], len(shape))))
        for rank, coordinate in enumerate(product(*(range(ranks) for ranks in mesh))):
            sources[rank] += shards_of(f"w{index}", torch.float32, shape, mesh, coordinate, placements)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard_plan, "SPLIT_BYTES", 64)
        shared = list(share(sources))
    whole = tuple(
        shard for i, shape in enumerate(shapes) for shard in shards_of(f"w{i}", torch.float32, shape, (), (), ())
    )
    copies = plan(shared, whole)
    staged = [sum(shard.bytes for shard in mine) for mine in shared]
    pulled = [sum(prod(copy.shape) * 4 for copy in copies if copy.source == rank) for rank in range(len(sources))]
    assert pulled == staged
    assert sum(staged) == sum(shard.bytes for shard in whole)
    replicas = prod(mesh[1:])
    for place in range(replicas):
        loads = staged[place::replicas]
        assert max(loads) - min(loads) <= granule(sources, shared, 64)


Pieces = list[list[Rectangle]]


def shared_among(holders: int, shape: tuple[int, ...], split_bytes: int) -> Pieces:
    """What each of the holders of a tensor of this shape keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard_plan, "SPLIT_BYTES", split_bytes)
        kept = share([shards_of("w", torch.float32, shape, (), (), ())] * holders)
    return [[(shard.offset, shard.shape) for shard in mine] for mine in kept]


def test_a_rectangle_is_divided_along_its_first_dim_that_divides_evenly_or_else_along_the_longest() -> None:
    assert shared_among(2, (4, 9), 64) == [[((0, 0), (2, 9))], [((2, 0), (2, 9))]]
    assert shared_among(2, (7, 3), 64) == [[((3, 0), (4, 3))], [((0, 0), (3, 3))]]
    # 17 of 50 rows are 2 % more than a third
    assert [mine[0][1] for mine in shared_among(3, (50, 99), 64)] == [(17, 99), (17, 99), (16, 99)]


def test_holders_for_whom_nothing_is_left_keep_nothing() -> None:
    assert sorted(shared_among(5, (3,), 8)) == [[], [], [((0,), (1,))], [((1,), (1,))], [((2,), (1,))]]


def test_only_a_rectangle_of_more_than_the_bytes_to_split_is_divided() -> None:
    assert shared_among(2, (SPLIT_BYTES // 4,), SPLIT_BYTES) == [[((0,), (SPLIT_BYTES // 4,))], []]
    assert all(shared_among(2, (SPLIT_BYTES // 4 + 2,), SPLIT_BYTES))


def test_of_small_rectangles_the_largest_is_given_away_first() -> None:
    layout = layout_of({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(8)})
    assert [[shard.name for shard in mine] for mine in share([layout, layout])] == [["c"], ["a", "b"]]


def test_rectangles_that_only_touch_have_nothing_in_common() -> None:
    assert common(((0, 0), (2, 3)), ((2, 0), (2, 3))) is None
    assert common(((0, 0), (2, 3)), ((1, 1), (4, 4))) == ((1, 1), (1, 2))


def test_what_one_rank_holds_twice_is_not_divided() -> None:
    (held,) = shards_of("w", torch.float32, (1024, 1024), (), (), ())
    assert share([(held, held)]) == ((held,),)


def test_a_plan_spreads_what_was_not_shared_over_its_holders() -> None:
    layout = shards_of("w", torch.float32, (1024, 1024), (), (), ())
    assert [(copy.source, copy.offset, copy.shape) for copy in plan([layout, layout], layout)] == [
        (0, (0, 0), (512, 1024)),
        (1, (512, 0), (512, 1024)),
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


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (0, "they hold nothing"),
        (5, "they hold `w0`, `w1`, `w2`, `w3`, `w4`"),
        (6, "they hold `w0`, `w1`, `w2`, `w3`, `w4` and 1 more"),
        (7, "they hold `w0`, `w1`, `w2`, `w3`, `w4` and 2 more"),
    ],
)
def test_of_what_sources_hold_the_first_few_are_named_and_the_others_counted(held: int, said: str) -> None:
    source = layout_of({f"w{index}": torch.zeros(1) for index in range(held)})
    with pytest.raises(WeightsError, match=f"`v` is held by no source; {said}$"):
        plan([source], layout_of({"v": torch.zeros(1)}))


def test_missing_rows_are_named() -> None:
    first_half = shards_of("w", torch.float32, (4, 4), (2,), (0,), (Shard(0),))
    with pytest.raises(WeightsError, match=r"`w`: the \(2, 4\) elements at \(2, 0\) are held by no source"):
        plan([first_half], shards_of("w", torch.float32, (4, 4), (), (), ()))


def test_sources_that_disagree_about_a_tensor_are_named() -> None:
    layouts = [shards_of("w", torch.float32, (rows,), (), (), ()) for rows in (4, 5)]
    with pytest.raises(
        WeightsError, match=r"`w` is torch.float32 \(4,\) at one source and torch.float32 \(5,\) at source 1"
    ):
        share(layouts)


def test_floating_point_types_may_differ() -> None:
    source = shards_of("w", torch.float32, (4,), (), (), ())
    assert len(plan([source], shards_of("w", torch.bfloat16, (4,), (), (), ()))) == 1


def test_partial_placements_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"`w` is placed as .*; weights must be sharded or replicated"):
        shards_of("w", torch.float32, (4,), (2,), (0,), (Partial(),))


def test_layout_of_plain_tensors_is_the_whole_of_each() -> None:
    (held,) = layout_of({"w": torch.zeros(2, 3), "empty": torch.zeros(0, 3)})
    assert (held.name, held.offset, held.shape, held.start) == ("w", (0, 0), (2, 3), (0, 0))


@pytest.fixture
def second_of_three() -> Iterator[None]:
    """This process is the second of three, of which the others are not there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("second_of_three")
def test_layout_of_a_sharded_tensor_is_this_ranks_part_and_that_of_others_is_left_out() -> None:
    everyone, others = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 2])
    tensors = {
        "elsewhere": DTensor.from_local(torch.zeros(2, 4), others, [Shard(0)]),
        "rows": DTensor.from_local(torch.zeros(2, 4), everyone, [Shard(0)]),
        "whole": torch.zeros(3),
    }
    held = layout_of(tensors)
    assert [(s.name, s.global_shape, s.offset, s.shape) for s in held] == [
        ("rows", (6, 4), (2, 0), (2, 4)),
        ("whole", (3,), (0,), (3,)),
    ]


@pytest.mark.usefixtures("second_of_three")
def test_a_rank_that_holds_more_than_its_placement_says_is_refused() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    torn = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], shape=torch.Size((6, 4)), stride=(4, 1))
    with pytest.raises(WeightsError, match=r"`w`: \(Shard\(dim=0\),\) say 8 elements, this rank holds 12"):
        layout_of({"w": torn})

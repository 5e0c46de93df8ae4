"""Names that differ between trainer and generator: weights-11, and that every element still arrives."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_store import LocalStore
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from goaly.base.errors import WeightsError
from goaly.weights.dtensor_layout import check_filled, layout_of, shards_of
from goaly.weights.layout import Extent, Layout, Part, Shard, region, view
from goaly.weights.naming import Naming, Parts, fused, one_of, renamed, same
from goaly.weights.publisher import Publisher
from goaly.weights.reshard_plan import plan, share
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

HEAD_DIM, DIM = 3, 5


def numbered(first: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(first, first + prod(shape), dtype=torch.float64).reshape(shape)


def whole(tensors: dict[str, torch.Tensor]) -> Layout:
    return layout_of(tensors)


def sharded(
    tensors: dict[str, torch.Tensor], placements: dict[str, ShardPlacement], ranks: int
) -> tuple[list[dict[str, torch.Tensor]], list[Layout]]:
    """What each rank holds: its local tensors and their layout."""
    locals_, layouts = [], []
    for rank in range(ranks):
        mine, layout = {}, ()
        for name, tensor in tensors.items():
            placement = placements.get(name, Replicate())
            held = shards_of(name, tensor.dtype, tuple(tensor.shape), (ranks,), (rank,), (placement,))
            layout += held
            mine[name] = tensor if isinstance(placement, Replicate) else _chunk(tensor, ranks, rank, placement.dim)
        locals_.append(mine)
        layouts.append(layout)
    return locals_, layouts


def _chunk(tensor: torch.Tensor, ranks: int, rank: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(ranks, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def move(
    sources: list[dict[str, torch.Tensor]],
    held: list[Layout],
    destination: dict[str, torch.Tensor],
    wanted: Layout,
) -> dict[str, torch.Tensor]:
    """Stage what `share` leaves, then copy it into NaNs as the plan says; every element is written once."""
    shared = share(held)
    staged = [[view(tensors, shard).clone() for shard in mine] for tensors, mine in zip(sources, shared, strict=True)]
    received = {name: torch.full_like(tensor, torch.nan) for name, tensor in destination.items()}
    for copy in plan(shared, wanted):
        source = region(staged[copy.source][copy.source_shard], copy.source_offset, copy.shape)
        target = region(view(received, wanted[copy.shard]), copy.offset, copy.shape)
        assert target.isnan().all()
        target.copy_(source)
    return received


def assert_moved(sources, held, destination, wanted) -> None:
    check_filled(destination, wanted)
    received = move(sources, held, destination, wanted)
    for name, tensor in destination.items():
        assert torch.equal(received[name], tensor), name


def grouped(shapes: dict[str, Extent], *, dim: int, groups: int) -> Parts:
    """Tensors one after another along `dim`, in several groups: each has an equal stretch of every tensor."""
    parts: list[Part] = []
    end = 0
    for group in range(groups):
        for name, shape in shapes.items():
            length = shape[dim] // groups
            (whole,) = same(name, shape)
            parts.append(
                replace(
                    whole,
                    offset=at(whole.offset, dim, group * length),
                    shape=at(shape, dim, length),
                    start=at(whole.start, dim, end),
                )
            )
            end += length
    return tuple(parts)


def transposed(parts: Parts, dims: Extent) -> Parts:
    """The parts of a tensor after `permute(dims)`."""
    return tuple(
        replace(
            part,
            start=tuple(part.start[dim] for dim in dims),
            dims=tuple(None if dim is None else dims.index(dim) for dim in part.dims or range(len(dims))),
        )
        for part in parts
    )


def concatenated(tensor: str, parts: Sequence[Layout], *, dim: int) -> Layout:
    """The layout of a rank whose local `tensor` has its share of each part, one after another along `dim`."""
    shards: list[Shard] = []
    end = 0
    for part in parts:
        shards.extend(
            replace(shard, tensor=tensor, start=at(shard.start, dim, shard.start[dim] + end)) for shard in part
        )
        end += max((shard.start[dim] + shard.shape[dim] for shard in part), default=0)
    return tuple(shards)


def at(extent: Extent, dim: int, value: int) -> Extent:
    return (*extent[:dim], value, *extent[dim + 1 :])


@settings(deadline=None, max_examples=60)
@given(
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.integers(1, 3),
    trainers=st.integers(1, 4),
    generators=st.integers(1, 4),
)
def test_grouped_heads_arrive_in_fused_local_shards(kv_heads, heads_per_kv, trainers, generators) -> None:
    """torchtitan's [group: q.., k, v] rows, over FSDP, into vLLM's [q heads | k heads | v heads] of each rank."""
    heads, tp = kv_heads * heads_per_kv, generators * kv_heads
    shapes = {"q": (heads * HEAD_DIM, DIM), "k": (kv_heads * HEAD_DIM, DIM), "v": (kv_heads * HEAD_DIM, DIM)}
    q, k, v = (numbered(1000 * index, shape) for index, shape in enumerate(shapes.values()))
    groups = [tensor.view(kv_heads, -1, HEAD_DIM, DIM) for tensor in (q, k, v)]
    wqkv = torch.cat(groups, dim=1).reshape(-1, DIM)
    sources, held = sharded({"wqkv": wqkv}, {"wqkv": ShardPlacement(0)}, trainers)
    naming = {"wqkv": grouped(shapes, dim=0, groups=kv_heads)}
    held = [renamed(layout, naming) for layout in held]
    for rank in range(tp):  # `generators` ranks hold each kv head, as where there are more ranks than kv heads
        of_q = shards_of("q", q.dtype, shapes["q"], (tp,), (rank,), (ShardPlacement(0),))
        on_kv = (kv_heads, generators), (rank // generators, rank % generators), (ShardPlacement(0), Replicate())
        wanted = concatenated(
            "qkv_proj", [of_q, *(shards_of(name, q.dtype, shapes[name], *on_kv) for name in "kv")], dim=0
        )
        kv = rank // generators
        local = torch.cat([_chunk(q, tp, rank, 0), _chunk(k, kv_heads, kv, 0), _chunk(v, kv_heads, kv, 0)])
        assert_moved(sources, held, {"qkv_proj": local}, wanted)


@pytest.mark.parametrize(("trainers", "tp"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_gate_and_up_are_fused_within_each_expert_and_rank(trainers: int, tp: int) -> None:
    shape = (4, 6, 5)
    gate, up = numbered(0, shape), numbered(500, shape)
    sources, held = sharded({"w1": gate, "w3": up}, {"w1": ShardPlacement(0), "w3": ShardPlacement(0)}, trainers)
    for rank in range(tp):
        parts = [shards_of(name, gate.dtype, shape, (tp,), (rank,), (ShardPlacement(1),)) for name in ("w1", "w3")]
        local = torch.cat([_chunk(gate, tp, rank, 1), _chunk(up, tp, rank, 1)], dim=1)
        assert_moved(sources, held, {"w13": local}, concatenated("w13", parts, dim=1))


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_one_tensor_an_expert_and_a_stack_fill_each_other(trainers: int) -> None:
    stack = numbered(0, (4, 6, 5))
    separate = {f"expert.{index}": stack[index] for index in range(4)}
    naming = {name: one_of("stack", index=i, count=4, shape=(6, 5)) for i, name in enumerate(separate)}
    sources, held = sharded({"stack": stack}, {"stack": ShardPlacement(1)}, trainers)
    assert_moved(sources, held, separate, renamed(whole(separate), naming))
    sources, held = sharded(separate, {name: ShardPlacement(1) for name in separate}, trainers)
    assert_moved(sources, [renamed(layout, naming) for layout in held], {"stack": stack}, whole({"stack": stack}))


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(3)), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_permuted_dims_arrive_in_order(dims, trainers, generators, source_dim, destination_dim) -> None:
    shape = (4, 3, 5)
    tensor = numbered(0, shape)
    permuted = tensor.permute(*dims).contiguous()
    sources, held = sharded({"w": tensor}, {"w": ShardPlacement(source_dim)}, trainers)
    locals_, wanted = sharded({"w_permuted": permuted}, {"w_permuted": ShardPlacement(destination_dim)}, generators)
    naming = {"w_permuted": transposed(same("w", shape), tuple(dims))}
    for local, layout in zip(locals_, wanted, strict=True):
        assert_moved(sources, held, local, renamed(layout, naming))


def test_a_fused_stack_of_transposed_experts_arrives() -> None:
    gate, up = numbered(0, (2, 3, 4)), numbered(100, (2, 3, 4))
    destination = {"gate_up_EDF": torch.cat([gate, up], dim=1).transpose(1, 2).contiguous()}
    naming = {"gate_up_EDF": transposed(fused({"w1": (2, 3, 4), "w3": (2, 3, 4)}, dim=1), (0, 2, 1))}
    sources, held = sharded({"w1": gate, "w3": up}, {"w1": ShardPlacement(1), "w3": ShardPlacement(2)}, 2)
    assert_moved(sources, held, destination, renamed(whole(destination), naming))


def test_renaming_twice_is_one_renaming_after_the_other() -> None:
    stack = numbered(0, (2, 3, 4))
    destination = {"mine": stack[1].T.contiguous()}
    once = renamed(whole(destination), {"mine": transposed(same("expert.1", (3, 4)), (1, 0))})
    wanted = renamed(once, {"expert.1": one_of("stack", index=1, count=2, shape=(3, 4))})
    assert_moved([{"stack": stack}], [whole({"stack": stack})], destination, wanted)


def test_a_tied_output_is_filled_from_the_embedding_and_published_once() -> None:
    embedding = numbered(0, (4, 3))
    naming: Naming = {"lm_head": same("embedding", (4, 3))}
    both = {"embedding": embedding, "lm_head": embedding}
    assert_moved([{"embedding": embedding}], [whole({"embedding": embedding})], both, renamed(whole(both), naming))
    (published,) = share([renamed(whole(both), naming)])
    assert [(shard.name, shard.tensor) for shard in published] == [("embedding", None)]


def test_a_tensor_without_parts_is_not_moved() -> None:
    assert renamed(whole({"cache": torch.zeros(2), "w": torch.zeros(1)}), {"cache": ()}) == whole({"w": torch.zeros(1)})


@pytest.mark.parametrize(
    "parts",
    [
        fused({"q": (2, 3), "k": (1, 3)}, dim=0),
        fused({"q": (4, 3), "k": (1, 3)}, dim=0),
        fused({"q": (2, 3)}, dim=0) * 2,
        tuple(replace(part, start=(1, 0)) for part in same("q", (4, 3))),
    ],
    ids=["a gap", "more", "twice", "beyond the end"],
)
def test_parts_that_do_not_cover_a_tensor_once_are_refused(parts) -> None:  # weights-11
    with pytest.raises(WeightsError, match=r"`qkv` has shape \(4, 3\), which its parts don't cover once"):
        renamed(whole({"qkv": torch.zeros(4, 3)}), {"qkv": parts})


def test_of_parts_that_leave_a_gap_the_first_four_are_told_with_their_places() -> None:
    parts = fused({f"w{index}": (index + 1, 3) for index in range(6)}, dim=0)
    told = r"cover once: \(1, 3\) at \(0, 0\), \(2, 3\) at \(1, 0\), \(3, 3\) at \(3, 0\), \(4, 3\) at \(6, 0\)$"
    with pytest.raises(WeightsError, match=told):
        renamed(whole({"all": torch.zeros(22, 3)}), {"all": parts})
    layout = tuple(
        replace(shard, tensor="all") for shard in renamed(whole({"all": torch.zeros(21, 3)}), {"all": parts})
    )
    with pytest.raises(WeightsError, match=told):
        check_filled({"all": torch.zeros(22, 3)}, layout)


def test_a_part_of_a_fused_part_keeps_its_place_in_the_tensor_that_it_was_fused_into() -> None:
    fused_qkv = whole({"qkv": numbered(0, (6, 3))})
    _, k = renamed(fused_qkv, {"qkv": fused({"q": (2, 3), "k": (4, 3)}, dim=0)})
    assert k.part(((1, 0), (3, 3))).start == (3, 0)
    assert view({"qkv": numbered(0, (6, 3))}, k.part(((3, 1), (1, 2)))).tolist() == [[16, 17]]
    w = numbered(0, (3, 2))
    (turned,) = renamed(whole({"w": w}), {"w": transposed(same("turned", (2, 3)), (1, 0))})
    assert torch.equal(view({"w": w}, turned.part(((1, 0), (1, 2)))), w.T[1:, :2])


def test_one_of_a_stack_is_one_index_long_and_where_its_number_says() -> None:
    (part,) = one_of("stack", index=2, count=4, shape=(6, 5))
    assert (part.global_shape, part.offset, part.shape) == ((4, 6, 5), (2, 0, 0), (1, 6, 5))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            3,
            r"`qkv` has shape \(3, 3\) here, which the layout doesn't cover once: \(2, 3\) at \(0, 0\), \(2,",
        ),
        (5, r"`qkv` has shape \(5, 3\) here, which the layout doesn't cover once"),
        (None, "`qkv` is in the layout, this rank has no such tensor"),
    ],
)
def test_a_layout_that_leaves_a_local_tensor_unwritten_is_refused(rows, said) -> None:
    part = shards_of("q", torch.float32, (2, 3), (), (), ())
    layout = concatenated("qkv", [part, part], dim=0)
    with pytest.raises(WeightsError, match=said):
        check_filled({} if rows is None else {"qkv": torch.zeros(rows, 3)}, layout)


QKV = {"q": (8, 4), "k": (2, 4), "v": (2, 4)}


@pytest.mark.parametrize("groups", [1, 2])
async def test_a_reader_with_a_fused_qkv_and_an_own_name_for_the_head_follows_a_trainer_without(groups: int) -> None:
    held = {name: torch.zeros(shape) for name, shape in QKV.items()} | {"embedding": torch.zeros(6, 4)}
    naming = {
        "qkv": fused(QKV, dim=0) if groups == 1 else grouped(QKV, dim=0, groups=groups),
        "head.t": transposed(same("embedding", (6, 4)), (1, 0)),
        "rope.cache": (),
    }
    read = {"qkv": torch.zeros(12, 4), "head.t": torch.zeros(4, 6), "rope.cache": torch.ones(3)}
    store, chosen = LocalStore(WeightSettings()), WeightSettings()
    publisher = Publisher(store, held, chosen, rank=0, world=1)
    subscriber = Subscriber(store, read, "fused", chosen, naming=naming)
    for version in range(3):
        for number, tensor in enumerate(held.values()):
            tensor.copy_(numbered(100 * number + 1000 * version, tuple(tensor.shape)))
        await publisher.publish(version)
        assert await subscriber.newest(version - 1) == version
        assert await subscriber.prefetch(version)
        subscriber.apply()
        q, k, v = (held[name].chunk(groups) for name in QKV)
        assert torch.equal(read["qkv"], torch.cat([part for group in zip(q, k, v, strict=True) for part in group]))
        assert torch.equal(read["head.t"], held["embedding"].T)
        assert torch.equal(read["rope.cache"], torch.ones(3))
    await subscriber.close()
    await publisher.close()


async def test_a_trainer_with_a_fused_qkv_publishes_its_parts() -> None:
    held, read = {"qkv": numbered(0, (12, 4))}, {name: torch.zeros(shape) for name, shape in QKV.items()}
    store = LocalStore(WeightSettings())
    publisher = Publisher(store, held, WeightSettings(), rank=0, world=1, naming={"qkv": grouped(QKV, dim=0, groups=2)})
    subscriber = Subscriber(store, read, "split", WeightSettings())
    await publisher.publish(0)
    assert await subscriber.newest() == 0
    assert await subscriber.prefetch(0)
    subscriber.apply()
    first, second = held["qkv"].chunk(2)
    for name, rows in (("q", slice(0, 4)), ("k", slice(4, 5)), ("v", slice(5, 6))):
        assert torch.equal(read[name], torch.cat([first[rows], second[rows]]).float())
    await subscriber.close()
    await publisher.close()

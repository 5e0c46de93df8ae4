"""Names that differ between trainer and reader: which published tensors a tensor is made of.

A tensor may be known by another name elsewhere, or be made of other tensors: fused, one of a stack, tied. A `Naming`
lists its parts, rectangle by rectangle. The publisher's and the reader's layouts are each translated into the published
names, so `plan` need not know of it:

    {"qkv.weight": fused({"q": (8, 4), "k": (2, 4), "v": (2, 4)}, dim=0)}             rows of q, then k, then v
    {"expert.3.up": one_of("up_EFD", index=3, count=128, shape=(6, 4))}               the fourth of a stack
    {"lm_head.weight": same("tok_embeddings.weight", (9, 4))}                         tied
    {"rope.cache": ()}                                                                not moved at all

A `Part` of your own describes anything else made of rectangles: grouped heads, transposed dims, a tensor-parallel
rank's fused projections (`goaly.models.vllm_naming`).
"""

from collections.abc import Mapping
from dataclasses import replace

from goaly.base.errors import WeightsError
from goaly.weights.layout import Extent, Layout, Part, Shard, common, minus, tile

Parts = tuple[Part, ...]
Naming = Mapping[str, Parts]
"""The parts of each tensor that has another name elsewhere. A tensor without parts is not moved."""


def same(name: str, shape: Extent) -> Parts:
    """All of the tensor `name`."""
    zeros = tuple(0 for _ in shape)
    return (Part(name=name, global_shape=shape, offset=zeros, shape=shape, start=zeros),)


def fused(shapes: Mapping[str, Extent], *, dim: int) -> Parts:
    """These tensors one after another along `dim`."""
    parts: list[Part] = []
    end = 0
    for name, shape in shapes.items():
        (whole,) = same(name, shape)
        parts.append(replace(whole, start=(*whole.start[:dim], end, *whole.start[dim + 1 :])))
        end += shape[dim]
    return tuple(parts)


def one_of(name: str, *, index: int, count: int, shape: Extent) -> Parts:
    """One of the `count` tensors of this shape that are stacked in `name`, along its first dim."""
    (whole,) = same(name, shape)
    return (
        replace(
            whole,
            global_shape=(count, *shape),
            offset=(index, *whole.offset),
            shape=(1, *shape),
            dims=(None, *range(len(shape))),
        ),
    )


def renamed(layout: Layout, naming: Naming) -> Layout:
    """The layout with each tensor that `naming` lists as its parts, and all others unchanged."""
    shards: list[Shard] = []
    for shard in layout:
        parts = naming.get(shard.name)
        if parts is None:
            shards.append(shard)
            continue
        if parts and not tile(tuple(part.place for part in parts), shard.global_shape):  # weights-11
            places = ", ".join(f"{part.place[1]} at {part.place[0]}" for part in parts[:4])
            raise WeightsError(
                f"`{shard.name}` has shape {shard.global_shape}, which its parts don't cover once: {places}"
            )
        for part in parts:
            rectangle = common((shard.offset, shard.shape), part.place)
            if rectangle is not None:
                shards.append(_as_part(shard.part(rectangle), part))
    return tuple(shards)


def _as_part(shard: Shard, part: Part) -> Shard:
    """A shard that lies within a part, as a rectangle of the part's published tensor."""
    within = minus(shard.offset, part.start)
    dims = part.dims or tuple(range(len(part.shape)))
    return replace(
        shard,
        name=part.name,
        global_shape=part.global_shape,
        offset=tuple(at if dim is None else at + within[dim] for at, dim in zip(part.offset, dims, strict=True)),
        shape=tuple(1 if dim is None else shard.shape[dim] for dim in dims),
        tensor=shard.tensor or shard.name,
        dims=_composed(dims, shard.dims),
    )


def _composed(dims: tuple[int | None, ...], inner: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    """The local tensor's dims, where these are dims of a tensor whose dims are `inner`."""
    local = dims if inner is None else tuple(None if dim is None else inner[dim] for dim in dims)
    return None if local == tuple(range(len(local))) else local

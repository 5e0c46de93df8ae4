"""Tensors that are other tensors under another name: fused, transposed, one of a stack, tied. All as data.

A `Naming` says of which parts a tensor is made, rectangle by rectangle; `renamed` translates a layout by it. The
publisher's and the reader's layouts each are translated into the names that they agree on, and `plan` never knows:

    {"qkv.weight": fused({"q": (8, 4), "k": (2, 4), "v": (2, 4)}, dim=0)}             rows of q, then k, then v
    {"qkv.weight": fused({"q": (8, 4), "k": (2, 4), "v": (2, 4)}, dim=0, groups=2)}   4 of q, 1 of k, 1 of v, and again
    {"expert.3.up": one_of("up_EFD", index=3, count=128, shape=(6, 4))}               the fourth of a stack
    {"up_EDF": transposed(same("up_EFD", (128, 6, 4)), (0, 2, 1))}                    its last two dims exchanged
    {"lm_head.weight": same("tok_embeddings.weight", (9, 4))}                         tied
    {"rope.cache": ()}                                                                not moved at all

Where a tensor-parallel rank fuses what it holds of each part (vLLM's `qkv_proj`: its q heads, then its k heads, then
its v heads), its local tensor is no rectangle of a global one: `concatenated` is its layout.

Invariants
    WN-1  The parts of a tensor cover it exactly: a renamed layout has every element of the original once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from goaly.errors import WeightsError
from goaly.weights.layout import Layout, Shard
from goaly.weights.rectangle import Extent, Rectangle, along, common, minus, plus, tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rectangle of a tensor that is one of the tensor `name`; `dims` as in `Shard`."""

    name: str
    global_shape: Extent
    offset: Extent
    shape: Extent
    start: Extent
    """Where it begins in the tensor that it is a part of, in that tensor's dims."""
    dims: tuple[int | None, ...]

    @property
    def place(self) -> Rectangle:
        """The rectangle of the tensor that it is a part of."""
        return along(self.dims, self.start, self.shape)


Parts = tuple[Part, ...]
Naming = Mapping[str, Parts]
"""The parts of each tensor that has another name elsewhere; none: it is not moved."""


def same(name: str, shape: Extent) -> Parts:
    """All of the tensor `name`."""
    zeros = tuple(0 for _ in shape)
    return (Part(name=name, global_shape=shape, offset=zeros, shape=shape, start=zeros, dims=tuple(range(len(shape)))),)


def fused(shapes: Mapping[str, Extent], *, dim: int, groups: int = 1) -> Parts:
    """Tensors one after another along `dim`; of several groups, each has an equal stretch of every tensor."""
    parts: list[Part] = []
    end = 0
    for group in range(groups):
        for name, shape in shapes.items():
            length, rest = divmod(shape[dim], groups)
            if rest:
                raise WeightsError(f"`{name}` has {shape[dim]} indices in dim {dim}: must be a multiple of {groups}")
            (whole,) = same(name, shape)
            parts.append(
                replace(
                    whole,
                    offset=_at(whole.offset, dim, group * length),
                    shape=_at(shape, dim, length),
                    start=_at(whole.start, dim, end),
                )
            )
            end += length
    return tuple(parts)


def one_of(name: str, *, index: int, count: int, shape: Extent) -> Parts:
    """One of the `count` tensors of this shape that `name` is a stack of, in its first dim."""
    (whole,) = same(name, shape)
    return (
        replace(
            whole,
            global_shape=(count, *shape),
            offset=(index, *whole.offset),
            shape=(1, *shape),
            dims=(None, *whole.dims),
        ),
    )


def transposed(parts: Parts, dims: Extent) -> Parts:
    """What these parts are made into by `permute(dims)`."""
    return tuple(
        replace(
            part,
            start=tuple(part.start[dim] for dim in dims),
            dims=tuple(None if dim is None else dims.index(dim) for dim in part.dims),
        )
        for part in parts
    )


def renamed(layout: Layout, naming: Naming) -> Layout:
    """The layout with each tensor that `naming` has as its parts; all others as they are."""
    shards: list[Shard] = []
    for shard in layout:
        parts = naming.get(shard.name)
        if parts is None:
            shards.append(shard)
            continue
        if parts and not tile(tuple(part.place for part in parts), shard.global_shape):  # WN-1
            places = ", ".join(f"{part.place[1]} at {part.place[0]}" for part in parts[:4])
            raise WeightsError(
                f"`{shard.name}` has shape {shard.global_shape}, which its parts don't cover once: {places}"
            )
        for part in parts:
            rectangle = common((shard.offset, shard.shape), part.place)
            if rectangle is not None:
                shards.append(_as_part(shard.part(rectangle), part))
    return tuple(shards)


def concatenated(tensor: str, parts: Sequence[Layout], *, dim: int) -> Layout:
    """What a rank holds whose local `tensor` is what it holds of each part, one after another along `dim`."""
    shards: list[Shard] = []
    end = 0
    for part in parts:
        shards.extend(
            replace(shard, tensor=tensor, start=_at(shard.start, dim, shard.start[dim] + end)) for shard in part
        )
        end += max((shard.start[dim] + shard.shape[dim] for shard in part), default=0)
    return tuple(shards)


def _as_part(shard: Shard, part: Part) -> Shard:
    """A shard that lies within a part, as a rectangle of the tensor that the part is one of."""
    within = minus(shard.offset, part.start)
    return replace(
        shard,
        name=part.name,
        global_shape=part.global_shape,
        offset=plus(part.offset, tuple(0 if dim is None else within[dim] for dim in part.dims)),
        shape=tuple(1 if dim is None else shard.shape[dim] for dim in part.dims),
        tensor=shard.tensor or shard.name,
        dims=_composed(part.dims, shard.dims),
    )


def _composed(dims: tuple[int | None, ...], inner: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    """The local dims of dims that are other dims."""
    local = dims if inner is None else tuple(None if dim is None else inner[dim] for dim in dims)
    return None if local == tuple(range(len(local))) else local


def _at(extent: Extent, dim: int, value: int) -> Extent:
    return (*extent[:dim], value, *extent[dim + 1 :])

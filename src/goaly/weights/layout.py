"""Rectangles of tensors: which part of which tensor a rank holds.

A layout is a tuple of rectangles (`Shard`), read off tensors and DTensors by `dtensor_layout.py`. This module has no
dependency on DTensor, so that the weight store, which only compares layouts, starts without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

Extent = tuple[int, ...]
Rectangle = tuple[Extent, Extent]
"""Offset and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rectangle of the published tensor `name`, and its place in a tensor that is made of it."""

    name: str
    global_shape: Extent
    offset: Extent
    shape: Extent
    start: Extent
    """Where it begins in the tensor that is made of it, in that tensor's dims."""
    dims: tuple[int | None, ...] | None = None
    """For each dim that tensor's dim, or None if it has no such dim; None if all dims are the same."""

    @property
    def place(self) -> Rectangle:
        """Its rectangle in the tensor that is made of it."""
        if self.dims is None:
            return self.start, self.shape
        lengths = dict(zip(self.dims, self.shape, strict=True))
        return self.start, tuple(lengths[dim] for dim in range(len(self.start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Part):
    """One rectangle of a named global tensor, and its place in the local tensors of the rank that holds it."""

    dtype: torch.dtype
    tensor: str | None = None
    """The local tensor's name, if it differs (`naming.py`)."""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes its elements take."""
        return self.elements * self.dtype.itemsize

    def part(self, rectangle: Rectangle) -> "Shard":
        """The part that is this rectangle of the global tensor, which must lie within the shard."""
        offset, shape = rectangle
        if offset == self.offset:
            return self if shape == self.shape else replace(self, shape=shape)
        start = list(self.start)
        for dim, moved in zip(self.dims or range(len(offset)), minus(offset, self.offset), strict=True):
            if dim is not None:
                start[dim] += moved
        return replace(self, offset=offset, shape=shape, start=tuple(start))


Layout = tuple[Shard, ...]


def region(tensor: torch.Tensor, offset: Extent, shape: Extent) -> torch.Tensor:
    """A view of this rectangle of the tensor."""
    if tensor.shape == shape:
        return tensor
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def view(tensors: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    """The shard's elements within its rank's local tensors, in the order of the global tensor's dims."""
    held = region(tensors[shard.tensor or shard.name], *shard.place)
    if shard.dims is None:
        return held
    return held.permute([dim for dim in shard.dims if dim is not None]).view(shard.shape)


def in_dtype(layout: Layout, dtype: torch.dtype | None) -> Layout:
    """The layout with its floating-point shards in this type; unchanged without one.

    Vectors keep theirs: they are small, and a router's bias is not rounded for its reader either.
    """
    if dtype is None:
        return layout
    return tuple(
        replace(shard, dtype=dtype) if shard.dtype.is_floating_point and len(shard.shape) > 1 else shard
        for shard in layout
    )


def common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The intersection of two rectangles, or None if it is empty."""
    offset, shape = [], []
    for begin_one, length_one, begin_other, length_other in zip(*one, *other, strict=True):
        begin = max(begin_one, begin_other)
        length = min(begin_one + length_one, begin_other + length_other) - begin
        if length <= 0:
            return None
        offset.append(begin)
        shape.append(length)
    return tuple(offset), tuple(shape)


def without(rectangle: Rectangle, hole: Rectangle) -> list[Rectangle]:
    """A rectangle without a part of it, as disjoint rectangles."""
    left: list[Rectangle] = []
    for dim, begin in enumerate(minus(hole[0], rectangle[0])):
        end = begin + hole[1][dim]
        sides = (sliced(rectangle, dim, 0, begin), sliced(rectangle, dim, end, rectangle[1][dim]))
        left.extend(side for side in sides if side[1][dim])
        rectangle = sliced(rectangle, dim, begin, end)
    return left


@lru_cache(maxsize=256)  # the layers of a model repeat the same few rectangles
def cover(rectangle: Rectangle, others: tuple[Rectangle, ...]) -> tuple[list[tuple[int, Rectangle]], list[Rectangle]]:
    """Disjoint parts of the rectangle, each with the index of another that contains it; and the rest."""
    parts: list[tuple[int, Rectangle]] = []
    missing = [rectangle]
    for index, other in enumerate(others):
        holes, missing = missing, []
        for hole in holes:
            part = common(hole, other)
            if part is None:
                missing.append(hole)
            else:
                parts.append((index, part))
                missing.extend(without(hole, part))
    return parts, missing


def sliced(rectangle: Rectangle, dim: int, begin: int, end: int) -> Rectangle:
    """The rectangle's indices `begin` to `end - 1` along the dim, counted from its offset."""
    offset, shape = rectangle
    return (
        (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]),
        (*shape[:dim], end - begin, *shape[dim + 1 :]),
    )


@lru_cache(maxsize=1024)
def tile(rectangles: tuple[Rectangle, ...], shape: Extent) -> bool:
    """Whether the rectangles cover a tensor of this shape, each element once."""
    _, missing = cover((tuple(0 for _ in shape), shape), rectangles)
    return not missing and sum(prod(lengths) for _, lengths in rectangles) == prod(shape)


def joined(rectangles: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    """The same elements in fewer rectangles: two that touch along one dim and agree in all others become one."""
    found = sorted(set(rectangles))
    for dim in range(len(found[0][0]) if found else 0):
        ending: dict[Rectangle, Rectangle] = {}  # by the empty rectangle at its end, which is at the next one's begin
        for one in found:
            before = ending.pop(sliced(one, dim, 0, 0), None)
            if before is not None:
                one = sliced(before, dim, 0, before[1][dim] + one[1][dim])
            end = sliced(one, dim, one[1][dim], one[1][dim])
            ending[end] = min(one, ending.get(end, one))
        found = sorted(ending.values())
    return tuple(found)


def minus(one: Extent, other: Extent) -> Extent:
    """The difference, dim by dim."""
    return tuple(a - b for a, b in zip(one, other, strict=True))

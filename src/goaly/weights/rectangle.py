"""Rectangles of tensors: an offset and a length in each dim."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations
from math import prod

Extent = tuple[int, ...]
Rectangle = tuple[Extent, Extent]
"""Offset and shape."""


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
    offset, shape = list(rectangle[0]), list(rectangle[1])
    left: list[Rectangle] = []
    for dim, (hole_begin, hole_length) in enumerate(zip(*hole, strict=True)):
        begin, end = offset[dim], offset[dim] + shape[dim]
        for part_begin, part_end in ((begin, hole_begin), (hole_begin + hole_length, end)):
            if part_begin < part_end:
                part_offset = (*offset[:dim], part_begin, *offset[dim + 1 :])
                left.append((part_offset, (*shape[:dim], part_end - part_begin, *shape[dim + 1 :])))
        offset[dim], shape[dim] = hole_begin, hole_length
    return left


@lru_cache(maxsize=256)  # the layers of a model repeat the same few rectangles
def cover(rectangle: Rectangle, others: tuple[Rectangle, ...]) -> tuple[list[tuple[int, Rectangle]], list[Rectangle]]:
    """Disjoint parts of the rectangle, each with the index of another that contains it; and the rest."""
    parts: list[tuple[int, Rectangle]] = []
    missing = [rectangle]
    for index, other in enumerate(others):
        left = []
        for hole in missing:
            part = common(hole, other)
            if part is None:
                left.append(hole)
            else:
                parts.append((index, part))
                left.extend(without(hole, part))
        missing = left
        if not missing:
            break
    return parts, missing


def sliced(rectangle: Rectangle, dim: int, begin: int, end: int) -> Rectangle:
    """The rectangle's indices `begin` to `end - 1` along the dim, counted from its offset."""
    offset, shape = rectangle
    return (
        (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]),
        (*shape[:dim], end - begin, *shape[dim + 1 :]),
    )


def along(dims: tuple[int | None, ...], start: Extent, shape: Extent) -> Rectangle:
    """The rectangle at `start` with this shape along these dims; None is a dim that its tensor lacks."""
    lengths = {dim: length for dim, length in zip(dims, shape, strict=True) if dim is not None}
    return start, tuple(lengths[dim] for dim in range(len(start)))


@lru_cache(maxsize=1024)
def tile(rectangles: tuple[Rectangle, ...], shape: Extent) -> bool:
    """Whether the rectangles cover a tensor of this shape, each element once."""
    whole = (tuple(0 for _ in shape), shape)
    return (
        all(common(one, whole) == one for one in rectangles)
        and sum(prod(lengths) for _, lengths in rectangles) == prod(shape)
        and all(common(one, other) is None for one, other in combinations(rectangles, 2))
    )


def joined(rectangles: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    """The same elements in fewer rectangles: two that touch along one dim and agree in all others become one."""
    found = list(dict.fromkeys(rectangles))
    for dim in range(len(found[0][0]) if found else 0):
        parts = sorted((*_but(dim, one), one[0][dim], one) for one in found)
        found = []
        for *_, (offset, shape) in parts:
            last = found[-1] if found else None
            touches = last is not None and last[0][dim] + last[1][dim] == offset[dim]
            if last is not None and touches and _but(dim, last) == _but(dim, (offset, shape)):
                found[-1] = sliced(last, dim, 0, last[1][dim] + shape[dim])
            else:
                found.append((offset, shape))
    return tuple(found)


def _but(dim: int, rectangle: Rectangle) -> Rectangle:
    """The rectangle in all dims but one."""
    offset, shape = rectangle
    return (*offset[:dim], *offset[dim + 1 :]), (*shape[:dim], *shape[dim + 1 :])


def plus(one: Extent, other: Extent) -> Extent:
    """The sum, dim by dim."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def minus(one: Extent, other: Extent) -> Extent:
    """The difference, dim by dim."""
    return tuple(a - b for a, b in zip(one, other, strict=True))

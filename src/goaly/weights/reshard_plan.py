"""Resharding: the copies that bring tensors from the layout of some ranks to that of others. Pure arithmetic.

    weights-11: The copies of a plan write every element of the destination exactly once, from the source element of the
        same name and global position: the rectangles of a layout are those that torch places on the rank, the parts of
        a tensor cover it once, and a reader whose layout doesn't cover its parameters once is refused.

`share` keeps every element once: a rectangle that several ranks held is divided among them, so that two ranks with the
same rectangles have the same number of bytes, to within one granule: `SPLIT_BYTES`, or one index of the dim along which
a larger rectangle was cut, whichever is more. Readers that each read everything once load such ranks evenly, too. Both
are functions of their arguments: every process that computes them gets the same result.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import prod
from typing import NamedTuple

from goaly.base.errors import WeightsError
from goaly.weights.layout import Extent, Layout, Rectangle, Shard, cover, minus, sliced

SPLIT_BYTES = 1 << 20
"""A rectangle that several sources hold is divided among them if it is larger than this."""

EVEN_ENOUGH = 1.02
"""A rectangle is cut along the first dim whose largest slice is at most this factor larger than an even one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One rectangle to copy: out of `sources[source][source_shard]` into `destination[shard]`.

    Each offset is relative to its shard's rectangle.
    """

    source: int
    source_shard: int
    source_offset: Extent
    shard: int
    offset: Extent
    shape: Extent


class _Piece(NamedTuple):
    """A rectangle to assign to one of its holders."""

    shard: int
    rectangle: Rectangle
    itemsize: int
    holders: Sequence["_Holder"]

    @property
    def bytes(self) -> int:
        return prod(self.rectangle[1]) * self.itemsize


class _Holder(NamedTuple):
    rank: int
    index: int


_Held = tuple[Shard, dict[Rectangle, list[_Holder]]]
"""One shard of a tensor, and by each of the tensor's distinct rectangles the ranks that hold it."""


def share(sources: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts in which each rectangle that several sources hold stays with one of them."""
    pieces = [
        _Piece(0, rectangle, first.dtype.itemsize, holders)
        for first, places in _held(sources).values()
        for rectangle, holders in places.items()
    ]
    kept: list[list[tuple[int, Shard]]] = [[] for _ in sources]
    for piece, (rank, index) in _spread(pieces, len(sources)):
        kept[rank].append((index, sources[rank][index].part(piece.rectangle)))
    return tuple(tuple(shard for _, shard in sorted(mine, key=lambda one: (one[0], one[1].offset))) for mine in kept)


def plan(sources: Sequence[Layout], destination: Layout) -> tuple[Copy, ...]:
    """The copies that fill the destination (weights-11); raises a WeightsError that names anything no source holds."""
    found = _held(sources)
    pieces: list[_Piece] = []
    for position, shard in enumerate(destination):
        if shard.name not in found:
            raise WeightsError(f"`{shard.name}` is held by no source; they hold {_some_names(found)}")
        first, places = found[shard.name]
        _check_same(first, shard)
        rectangles = tuple(sorted(places))
        parts, missing = cover((shard.offset, shard.shape), rectangles)
        if missing:
            offset, shape = missing[0]
            raise WeightsError(f"`{shard.name}`: the {shape} elements at {offset} are held by no source")
        for index, part in parts:
            pieces.append(_Piece(position, part, shard.dtype.itemsize, places[rectangles[index]]))
    copies = [
        Copy(
            source=rank,
            source_shard=index,
            source_offset=minus(piece.rectangle[0], sources[rank][index].offset),
            shard=piece.shard,
            offset=minus(piece.rectangle[0], destination[piece.shard].offset),
            shape=piece.rectangle[1],
        )
        for piece, (rank, index) in _spread(pieces, len(sources))
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.shard, copy.offset)))


def _held(sources: Sequence[Layout]) -> dict[str, _Held]:
    """By name, each tensor that the sources hold, and the holders of its parts."""
    found: dict[str, _Held] = {}
    for rank, layout in enumerate(sources):
        for index, shard in enumerate(layout):
            first, places = found.setdefault(shard.name, (shard, {}))
            if first.global_shape != shard.global_shape or first.dtype != shard.dtype:
                raise WeightsError(
                    f"`{shard.name}` is {first.dtype} {first.global_shape} at one source and {shard.dtype} "
                    f"{shard.global_shape} at source {rank}; all must hold parts of one tensor"
                )
            holders = places.setdefault((shard.offset, shard.shape), [])
            if not holders or holders[-1].rank != rank:
                holders.append(_Holder(rank, index))
    return found


def _spread(pieces: Sequence[_Piece], ranks: int) -> list[tuple[_Piece, _Holder]]:
    """A holder for each piece; a large piece is divided among its holders.

    Two ranks with the same rectangles stay within a granule of each other: the less loaded rank gets the larger slice
    of a large one, by at most one index, and each small one.
    """
    loads = [0] * ranks
    chosen: list[tuple[_Piece, _Holder]] = []
    small: list[_Piece] = []

    def choose(piece: _Piece, holder: _Holder) -> None:
        loads[holder.rank] += piece.bytes
        chosen.append((piece, holder))

    def load(holder: _Holder) -> int:
        return loads[holder.rank]

    for piece in pieces:
        if len(piece.holders) == 1:
            choose(piece, piece.holders[0])
        elif piece.bytes > SPLIT_BYTES:
            slices = sorted(_slices(piece), key=lambda slice: -slice.bytes)
            for part, holder in zip(slices, sorted(piece.holders, key=load), strict=False):
                choose(part, holder)
        else:
            small.append(piece)
    for piece in sorted(small, key=lambda piece: -piece.bytes):
        choose(piece, min(piece.holders, key=load))
    return chosen


def _slices(piece: _Piece) -> list[_Piece]:
    """The piece in one slice for each holder, or in fewer if no dim is that long."""
    parts, shape = len(piece.holders), piece.rectangle[1]
    dim = next(
        (dim for dim, length in enumerate(shape) if -(-length // parts) * parts <= EVEN_ENOUGH * length),
        max(range(len(shape)), key=lambda dim: shape[dim]),
    )
    cuts = [shape[dim] * part // parts for part in range(parts + 1)]
    rectangles = [sliced(piece.rectangle, dim, begin, end) for begin, end in pairwise(cuts) if begin < end]
    return [piece._replace(rectangle=rectangle) for rectangle in rectangles]


def _check_same(source: Shard, destination: Shard) -> None:
    """Raise unless both are rectangles of tensors of one shape, and of types that cast."""
    if source.global_shape != destination.global_shape:
        raise WeightsError(
            f"`{destination.name}` has shape {destination.global_shape}, its sources have {source.global_shape}"
        )
    castable = source.dtype.is_floating_point and destination.dtype.is_floating_point
    if source.dtype != destination.dtype and not castable:
        raise WeightsError(f"`{destination.name}` is {destination.dtype}, its sources are {source.dtype}")


def _some_names(names: Collection[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in islice(names, 5))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"

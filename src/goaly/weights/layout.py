"""Which part of which tensor a rank holds, and what must be copied from where to move it to other ranks.

A layout is a tuple of rectangles (`Shard`), read off tensors or DTensors. Pure arithmetic from there on: `share`
divides what is held more than once among its holders, `plan` finds the copies that fill a destination.

Invariants
    WL-1  The copies of a plan write every element of the destination exactly once, from the source element of the
          same name and global position.
    WL-2  After `share`, the layouts hold what they held before, and rectangles that were held several times are held
          once, their bytes spread evenly over the holders.
    WL-3  Both depend on their arguments only: every process that computes them finds the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from goaly.errors import WeightsError

SPLIT_BYTES = 1 << 20
"""A rectangle that several sources hold is divided among them where it is larger."""

Extent = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rectangle of a named global tensor, and where it begins in the local tensor of the rank that holds it."""

    name: str
    dtype: torch.dtype
    global_shape: Extent
    offset: Extent
    shape: Extent
    start: Extent

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes its elements take."""
        return self.elements * self.dtype.itemsize


Layout = tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One rectangle to copy: out of `sources[source][source_shard]` into `destination[shard]`.

    The two offsets count from the beginning of the respective shard's rectangle.
    """

    source: int
    source_shard: int
    source_offset: Extent
    shard: int
    offset: Extent
    shape: Extent


def region(tensor: torch.Tensor, offset: Extent, shape: Extent) -> torch.Tensor:
    """The view of this rectangle of the tensor."""
    if tensor.shape == shape:
        return tensor
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A rectangle that has to come from one of its holders, each a (rank, index of shard)."""

    shard: int
    offset: Extent
    shape: Extent
    itemsize: int
    holders: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def share(sources: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts that remain when each rectangle that several sources hold is kept by one of them (WL-2)."""
    pieces = [
        _Piece(shard=0, offset=offset, shape=shape, itemsize=sources[rank][index].dtype.itemsize, holders=holders)
        for rectangles in _rectangles(sources).values()
        for (offset, shape), holders in rectangles.items()
        for rank, index in holders[:1]
    ]
    kept: list[list[tuple[int, Extent, Shard]]] = [[] for _ in sources]
    for piece, (rank, index) in _spread(pieces, len(sources)):
        whole = sources[rank][index]
        start = _plus(whole.start, _minus(piece.offset, whole.offset))
        kept[rank].append((index, piece.offset, replace(whole, offset=piece.offset, shape=piece.shape, start=start)))
    return tuple(tuple(shard for _, _, shard in sorted(mine, key=lambda one: one[:2])) for mine in kept)


def plan(sources: Sequence[Layout], destination: Layout) -> tuple[Copy, ...]:
    """The copies that fill the destination (WL-1); a WeightsError names what no source has."""
    rectangles = _rectangles(sources)
    pieces: list[_Piece] = []
    for position, shard in enumerate(destination):
        held = rectangles.get(shard.name)
        if held is None:
            raise WeightsError(f"`{shard.name}` is held by no source; they hold {_some(rectangles)}")
        missing = [(shard.offset, shard.shape)]
        for (offset, shape), holders in held.items():
            _check_same(sources[holders[0][0]][holders[0][1]], shard)
            left = []
            for rectangle in missing:
                common = _common(rectangle, (offset, shape))
                if common is None:
                    left.append(rectangle)
                    continue
                left.extend(_without(rectangle, common))
                pieces.append(
                    _Piece(
                        shard=position,
                        offset=common[0],
                        shape=common[1],
                        itemsize=shard.dtype.itemsize,
                        holders=holders,
                    )
                )
            missing = left
            if not missing:
                break
        if missing:
            offset, shape = missing[0]
            raise WeightsError(f"`{shard.name}`: the {shape} elements at {offset} are held by no source")
    copies = [
        Copy(
            source=rank,
            source_shard=index,
            source_offset=_minus(piece.offset, sources[rank][index].offset),
            shard=piece.shard,
            offset=_minus(piece.offset, destination[piece.shard].offset),
            shape=piece.shape,
        )
        for piece, (rank, index) in _spread(pieces, len(sources))
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.shard, copy.offset)))


def _rectangles(
    sources: Sequence[Layout],
) -> dict[str, dict[tuple[Extent, Extent], tuple[tuple[int, int], ...]]]:
    """By name, every distinct rectangle and who holds it."""
    found: dict[str, dict[tuple[Extent, Extent], tuple[tuple[int, int], ...]]] = {}
    for rank, layout in enumerate(sources):
        for index, shard in enumerate(layout):
            holders = found.setdefault(shard.name, {})
            key = (shard.offset, shard.shape)
            holders[key] = (*holders.get(key, ()), (rank, index))
    return found


def _spread(pieces: Sequence[_Piece], ranks: int) -> list[tuple[_Piece, tuple[int, int]]]:
    """A holder for each piece, the largest first to the holder with the least so far; large ones are divided."""
    loads = [0] * ranks
    chosen: list[tuple[_Piece, tuple[int, int]]] = []
    contested: list[_Piece] = []
    for piece in pieces:
        if len(piece.holders) > 1:
            contested.extend(_divided(piece))
        else:
            loads[piece.holders[0][0]] += piece.bytes
            chosen.append((piece, piece.holders[0]))
    for piece in sorted(contested, key=lambda piece: -piece.bytes):
        holder = min(piece.holders, key=lambda holder: loads[holder[0]])
        loads[holder[0]] += piece.bytes
        chosen.append((piece, holder))
    return chosen


def _divided(piece: _Piece) -> list[_Piece]:
    """The piece in as many slices as it has holders, if it is large; slices of the first dim that is long enough."""
    parts = len(piece.holders)
    dim = next((dim for dim, length in enumerate(piece.shape) if length >= parts), None)
    if piece.bytes <= SPLIT_BYTES or dim is None:
        return [piece]
    cuts = [piece.shape[dim] * part // parts for part in range(parts + 1)]
    return [
        replace(
            piece,
            offset=(*piece.offset[:dim], piece.offset[dim] + begin, *piece.offset[dim + 1 :]),
            shape=(*piece.shape[:dim], end - begin, *piece.shape[dim + 1 :]),
        )
        for begin, end in pairwise(cuts)
    ]


def _check_same(source: Shard, destination: Shard) -> None:
    """Raise unless both are rectangles of tensors of one shape, and of types that cast."""
    if source.global_shape != destination.global_shape:
        raise WeightsError(
            f"`{destination.name}` has shape {destination.global_shape}, its sources have {source.global_shape}"
        )
    castable = source.dtype.is_floating_point and destination.dtype.is_floating_point
    if source.dtype != destination.dtype and not castable:
        raise WeightsError(f"`{destination.name}` is {destination.dtype}, its sources are {source.dtype}")


def _common(one: tuple[Extent, Extent], other: tuple[Extent, Extent]) -> tuple[Extent, Extent] | None:
    """The rectangle that both contain, if any."""
    offset = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
    shape = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
    return None if any(length <= 0 for length in shape) else (offset, shape)


def _without(rectangle: tuple[Extent, Extent], hole: tuple[Extent, Extent]) -> list[tuple[Extent, Extent]]:
    """The rectangles that remain of one when a part of it is taken out."""
    offset, shape = list(rectangle[0]), list(rectangle[1])
    left: list[tuple[Extent, Extent]] = []
    for dim, (hole_begin, hole_length) in enumerate(zip(*hole, strict=True)):
        begin, end = offset[dim], offset[dim] + shape[dim]
        for part_begin, part_end in ((begin, hole_begin), (hole_begin + hole_length, end)):
            if part_begin < part_end:
                part_offset = (*offset[:dim], part_begin, *offset[dim + 1 :])
                left.append((part_offset, (*shape[:dim], part_end - part_begin, *shape[dim + 1 :])))
        offset[dim], shape[dim] = hole_begin, hole_length
    return left


def _plus(one: Extent, other: Extent) -> Extent:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Extent, other: Extent) -> Extent:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _some(names: Mapping[str, object]) -> str:
    shown = ", ".join(f"`{name}`" for name in list(names)[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"

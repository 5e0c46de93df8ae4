"""How a writer rank's layout is cut into buckets: what is staged, sealed and fetched at a time.

A reader across the network reads whole buckets. The needs of those that said in time what they need therefore decide
where tensors are cut and what shares a bucket; without any, tensors are cut into stretches of their rows.

Invariants
    WK-1  The pieces hold what the layout does, each element once, but in another order. No piece is larger than the
          limit, unless it is one element.
    WK-2  Each reader that told its needs needs all of a piece or nothing of it, and so it is with buckets: it reads
          nothing that it doesn't need.
    WK-3  A bucket has one piece, or several within the limit: what the same known readers need, or what is small. A
          reader that came later seldom reads what it needs nothing of.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from goaly.weights.layout import Layout, Shard
from goaly.weights.needs import Needs, needed_of
from goaly.weights.rectangle import Rectangle, common, sliced

SMALL = 1 / 8
"""Pieces below this part of a bucket share one, whoever needs them."""

Audience = tuple[bool, ...]
"""Which of the readers need a piece."""


def cut(layout: Layout, limit: int, needs: Sequence[Needs] = ()) -> tuple[Layout, tuple[range, ...]]:
    """The layout's pieces, and which of them are in each bucket of at most `limit` bytes."""
    buckets: list[list[Shard]] = []
    filling: dict[Audience, list[Shard]] = {}
    room: dict[Audience, int] = {}
    for piece, audience in _pieces(layout, limit, needs):
        if piece.bytes >= SMALL * limit and not any(audience):
            buckets.append([piece])
            continue
        if piece.bytes > room.get(audience, 0):  # WK-3
            filling[audience] = []
            buckets.append(filling[audience])
            room[audience] = limit
        filling[audience].append(piece)  # WK-2
        room[audience] -= piece.bytes
    ends = [0]
    for bucket in buckets:
        ends.append(ends[-1] + len(bucket))
    return tuple(piece for bucket in buckets for piece in bucket), tuple(range(*span) for span in pairwise(ends))


def _pieces(layout: Layout, limit: int, needs: Sequence[Needs]) -> list[tuple[Shard, Audience]]:
    """In the layout's order, its shards in pieces, each with its audience."""
    pieces = []
    known: dict[object, list[tuple[Rectangle, Audience]]] = {}  # the layers of a model are alike
    for shard in layout:
        place, needed = (shard.offset, shard.shape), needed_of(shard, needs)
        problem = (place, shard.dtype, needed)
        if problem not in known:
            known[problem] = [
                (rectangle, tuple(any(common(cell, part) for part in parts) for parts in needed))
                for cell in _cells(place, [part for parts in needed for part in parts])
                for rectangle in _within(limit, cell, shard.dtype.itemsize)
            ]
        pieces.extend((shard.part(rectangle), audience) for rectangle, audience in known[problem])
    return pieces


def _cells(rectangle: Rectangle, needed: Sequence[Rectangle]) -> list[Rectangle]:
    """The rectangle, cut in each dim where one of these parts of it begins or ends (WK-2)."""
    cells = [rectangle]
    for dim, (first, length) in enumerate(zip(*rectangle, strict=True)):
        edges = {edge - first for offset, shape in needed for edge in (offset[dim], offset[dim] + shape[dim])}
        cuts = sorted({0, length} | edges)
        cells = [sliced(cell, dim, begin, end) for cell in cells for begin, end in pairwise(cuts)]
    return cells


def _within(limit: int, rectangle: Rectangle, itemsize: int) -> list[Rectangle]:
    """The rectangle, cut along its first dim that can be, and what is too large yet along the next (WK-1)."""
    shape = rectangle[1]
    size = prod(shape) * itemsize
    dim = next((dim for dim, length in enumerate(shape) if length > 1), None)
    if size <= limit or dim is None:
        return [rectangle]
    length = shape[dim]
    rows = max(1, limit * length // size)
    return [
        piece
        for begin in range(0, length, rows)
        for piece in _within(limit, sliced(rectangle, dim, begin, min(begin + rows, length)), itemsize)
    ]

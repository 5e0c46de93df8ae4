"""How a writer rank's layout is cut into buckets, the units in which weights are staged and fetched.

A reader across the network fetches whole buckets. It tells the store which rectangles it needs; writers cut tensors at
the edges of the rectangles that they know when they join. Without any, tensors are cut into stretches of rows.

Pieces hold each element once, within the limit. A bucket's pieces are needed by the same known readers, so that these
fetch nothing that they don't need; small ones share a bucket, so that a later reader seldom fetches one in vain. A
reader that is wrong about a tensor's shape gets an error from `plan` and spoils no writer's buckets.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import prod

from goaly.weights.layout import Layout, Rectangle, Shard, common, joined, sliced

SMALL = 1 / 8
"""Pieces smaller than this fraction of a bucket share one."""

Needs = Mapping[str, tuple[Rectangle, ...]]
"""The rectangles of the published tensors that a reader needs, by the tensors' names."""

Audience = tuple[bool, ...]
"""Which of the readers need a piece."""


def needs_of(layout: Layout) -> Needs:
    """The needs of a reader that has this layout, with touching rectangles joined."""
    rectangles: dict[str, list[Rectangle]] = {}
    for shard in layout:
        rectangles.setdefault(shard.name, []).append((shard.offset, shard.shape))
    return {name: joined(needed) for name, needed in rectangles.items()}


def distinct(needs: Iterable[Needs]) -> tuple[Needs, ...]:
    """Each of them once: replicas need the same."""
    found: list[Needs] = []
    for one in needs:
        if one and one not in found:
            found.append(one)
    return tuple(found)


def cut(layout: Layout, limit: int, needs: Sequence[Needs] = ()) -> tuple[Layout, tuple[range, ...]]:
    """The layout's pieces, and which of them are in each bucket of at most `limit` bytes."""
    buckets: list[list[Shard]] = []
    filling: dict[Audience, list[Shard]] = {}
    room: dict[Audience, int] = {}
    for piece, audience in _pieces(layout, limit, needs):
        if piece.bytes >= SMALL * limit and not any(audience):
            buckets.append([piece])
            continue
        if piece.bytes > room.get(audience, 0):
            filling[audience] = []
            buckets.append(filling[audience])
            room[audience] = limit
        filling[audience].append(piece)
        room[audience] -= piece.bytes
    ends = accumulate(map(len, buckets), initial=0)
    return tuple(chain.from_iterable(buckets)), tuple(range(*span) for span in pairwise(ends))


def _needed_of(shard: Shard, needs: Sequence[Needs]) -> tuple[tuple[Rectangle, ...], ...]:
    """By reader, the parts of the shard that it needs."""
    place = (shard.offset, shard.shape)
    return tuple(
        tuple(
            part
            for rectangle in one.get(shard.name, ())
            if len(rectangle[0]) == len(shard.offset) and (part := common(place, rectangle)) is not None
        )
        for one in needs
    )


def _pieces(layout: Layout, limit: int, needs: Sequence[Needs]) -> list[tuple[Shard, Audience]]:
    """The layout's shards in pieces, each with its audience, in order."""
    pieces = []
    known: dict[object, list[tuple[Rectangle, Audience]]] = {}  # a model's layers repeat the same shapes
    for shard in layout:
        place, needed = (shard.offset, shard.shape), _needed_of(shard, needs)
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
    """The rectangle, cut in each dim where one of the needed parts begins or ends."""
    cells = [rectangle]
    for dim, (first, length) in enumerate(zip(*rectangle, strict=True)):
        edges = {edge - first for offset, shape in needed for edge in (offset[dim], offset[dim] + shape[dim])}
        cuts = sorted({0, length} | edges)
        cells = [sliced(cell, dim, begin, end) for cell in cells for begin, end in pairwise(cuts)]
    return cells


def _within(limit: int, rectangle: Rectangle, itemsize: int) -> list[Rectangle]:
    """The rectangle in pieces within the limit: cut along its first dim longer than 1, then along the next."""
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

"""Assigns sequences to the rows of data-parallel ranks. Pure and deterministic; `pack_rows` builds the rows' tensors.

Every sequence is in exactly one row, and is not split. Every rank gets the same number of rows, so that all ranks take
part in every collective. The same sequences in the same order give the same rows, bit for bit. If a batch has several
minibatches, each group is in one of them, and none is empty.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from goaly.base.errors import SchemaError
from goaly.trajectory import Row


def divide(weights: Sequence[int], minibatches: int) -> tuple[tuple[int, ...], ...]:
    """Divide groups with these token counts into minibatches with similar ones; groups by their index in the batch.

    The groups of a minibatch, and the minibatches by their first group, are in the order of the batch.
    """
    assert minibatches <= len(weights), "settings with more minibatches than groups are refused"
    heaviest_first = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
    return tuple(sorted(tuple(sorted(share)) for share in _deal(heaviest_first, weights, minibatches)))


def assign(lengths: Sequence[int], row_length: int, ranks: int) -> tuple[tuple[Row, ...], ...]:
    """The rows of each rank: as few as first-fit-decreasing needs, with tokens balanced over the ranks.

    Each sequence goes to the rank with the fewest tokens and is packed there. If that takes more rows than packing all
    sequences together, whole rows of the joint packing are distributed instead.
    """
    for place, length in enumerate(lengths):
        if length > row_length:
            raise SchemaError(f"sequence {place} has {length} tokens, more than backlog.row_length={row_length}")
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    joint = _first_fit(order, lengths, row_length)
    rows_per_rank = max(1, -(-len(joint) // ranks))
    dealt = [_first_fit(share, lengths, row_length) for share in _deal(order, lengths, ranks)]
    if max(len(rows) for rows in dealt) > rows_per_rank:
        weights = [sum(lengths[place] for place in row) for row in joint]
        heaviest_first = sorted(range(len(joint)), key=lambda at: (-weights[at], at))
        shares = _deal(heaviest_first, weights, ranks, most=rows_per_rank)
        dealt = [[joint[at] for at in share] for share in shares]
    return tuple(tuple(rows + [()] * (rows_per_rank - len(rows))) for rows in dealt)


def _first_fit(order: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    """Each sequence in the first row with room for it. A tree over the rows knows the most room in each half."""
    leaves = 1 << max(0, len(order) - 1).bit_length()
    room = [row_length] * (2 * leaves)
    rows: list[list[int]] = []
    for place in order:
        at = 1
        while at < leaves:
            at *= 2
            at += room[at] < lengths[place]
        if at - leaves == len(rows):
            rows.append([])
        rows[at - leaves].append(place)
        room[at] -= lengths[place]
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])
    return [tuple(row) for row in rows]


def _deal(order: Sequence[int], weights: Sequence[int], ranks: int, most: int | None = None) -> list[list[int]]:
    """Each item to the rank with the least weight so far; of several, the first. A rank gets at most `most` items."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0, rank) for rank in range(ranks)]
    for item in order:
        load, rank = heappop(lightest)
        shares[rank].append(item)
        if most is None or len(shares[rank]) < most:
            heappush(lightest, (load + weights[item], rank))
    return shares

"""How a writer rank's layout is cut into buckets: what is staged, sealed and fetched at a time.

Invariants
    WK-1  Cutting changes neither which elements a layout holds nor their order; no piece is larger than the limit
          unless a single row of it is.
    WK-2  The buckets are consecutive stretches of the layout, each of one piece or of small ones within the limit:
          a reader across the network, which reads whole buckets, seldom reads what it needs nothing of.
"""

from goaly.weights.layout import Layout, Shard

SMALL = 1 / 8
"""Pieces below this part of a bucket share one."""


def cut(layout: Layout, limit: int) -> Layout:
    """The layout with every shard of more than `limit` bytes in pieces along its first dim that can be cut (WK-1)."""
    return tuple(piece for shard in layout for piece in _pieces(shard, limit))


def buckets_of(layout: Layout, limit: int) -> tuple[range, ...]:
    """Which of its shards are in each bucket (WK-2)."""
    buckets: list[range] = []
    begin, held, alone = 0, 0, False
    for index, shard in enumerate(layout):
        large = shard.bytes >= SMALL * limit
        if index > begin and (large or alone or held + shard.bytes > limit):
            buckets.append(range(begin, index))
            begin, held = index, 0
        held, alone = held + shard.bytes, large
    if begin < len(layout):
        buckets.append(range(begin, len(layout)))
    return tuple(buckets)


def _pieces(shard: Shard, limit: int) -> Layout:
    dim = next((dim for dim, length in enumerate(shard.shape) if length > 1), None)
    if shard.bytes <= limit or dim is None:
        return (shard,)
    length = shard.shape[dim]
    rows = max(1, limit * length // shard.bytes)
    return tuple(
        shard.part(
            (_with(shard.offset, dim, shard.offset[dim] + begin), _with(shard.shape, dim, min(rows, length - begin)))
        )
        for begin in range(0, length, rows)
    )


def _with(extent: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*extent[:dim], value, *extent[dim + 1 :])

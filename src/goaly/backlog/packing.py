"""Which sequence lies in which row of which data-parallel rank, and the rows' tensors. Pure and deterministic.

Shape legend: R rows of one rank, L row length, T tokens of one sequence.

Invariants
    PK-1  Every sequence lies in exactly one row, whole.
    PK-2  Every rank gets the same number of rows, so that all take part in every collective.
    PK-3  The same sequences in the same order give the same rows, bit for bit.
    PK-4  Padding stands at a row's end, is never trained, and counts its own positions from 0.
    PK-5  A batch in several parts has each group whole in one of them, and none without a group.
"""

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict

from goaly.errors import SchemaError
from goaly.trajectory import NO_VERSION

Row = tuple[int, ...]
"""The sequences of one row, by their place in the batch."""


def divide(weights: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """The groups of these token counts in so many parts of about as many tokens, by their place in the batch.

    A part's groups stand in the batch's order, and so do the parts by their first groups.
    """
    assert parts <= len(weights), "a config with more parts than groups is refused"
    heaviest_first = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
    return tuple(sorted(tuple(sorted(share)) for share in _deal(heaviest_first, weights, parts)))  # PK-5


def assign(lengths: Sequence[int], row_length: int, ranks: int) -> tuple[tuple[Row, ...], ...]:
    """Each rank's rows: as few as first-fit-decreasing needs, with the tokens balanced over the ranks.

    Sequences are dealt to the rank with the fewest tokens and packed there. Where that would take more rows than
    packing them all together, whole rows of the joint packing are dealt instead.
    """
    for place, length in enumerate(lengths):
        if length > row_length:
            raise SchemaError(f"sequence {place} has {length} tokens, more than row_length={row_length}")
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))  # PK-3
    together = _first_fit(order, lengths, row_length)
    rows_per_rank = max(1, -(-len(together) // ranks))
    dealt = [_first_fit(share, lengths, row_length) for share in _deal(order, lengths, ranks)]
    if max(len(rows) for rows in dealt) > rows_per_rank:
        weights = [sum(lengths[place] for place in row) for row in together]
        heaviest_first = sorted(range(len(together)), key=lambda at: (-weights[at], at))
        shares = _deal(heaviest_first, weights, ranks, most=rows_per_rank)
        dealt = [[together[at] for at in share] for share in shares]
    return tuple(tuple(rows + [()] * (rows_per_rank - len(rows))) for rows in dealt)  # PK-2


def _first_fit(order: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    rows: list[list[int]] = []
    space: list[int] = []
    for place in order:
        row = next((at for at, free in enumerate(space) if free >= lengths[place]), None)
        if row is None:
            rows.append([])
            space.append(row_length)
            row = len(rows) - 1
        rows[row].append(place)
        space[row] -= lengths[place]
    return [tuple(row) for row in rows]


def _deal(order: Sequence[int], weights: Sequence[int], ranks: int, most: int | None = None) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in order:
        open_ranks = [rank for rank in range(ranks) if most is None or len(shares[rank]) < most]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        shares[rank].append(item)
        loads[rank] += weights[item]
    return shares


def pack(sequences: Sequence[TensorDict], rows: Sequence[Row], row_length: int, pad_token: int) -> TensorDict:
    """One rank's rows `[R, L]` of these sequences, with `positions` added."""
    dtypes = columns_of(sequences)
    packed = {key: torch.zeros(len(rows), row_length, dtype=dtype) for key, dtype in dtypes.items()}
    packed["tokens"].fill_(pad_token)
    packed["sampler_versions"].fill_(NO_VERSION)
    positions_RL = torch.zeros(len(rows), row_length, dtype=torch.int64)
    used = [0] * len(rows)
    for place, row, span in spans([sequence.batch_size[0] for sequence in sequences], rows):
        for key, column in packed.items():
            column[row, span] = sequences[place][key]
        positions_RL[row, span] = torch.arange(span.stop - span.start)
        used[row] = span.stop
    for row, stop in enumerate(used):
        positions_RL[row, stop:] = torch.arange(row_length - stop)  # PK-4
    return TensorDict({**packed, "positions": positions_RL}, batch_size=[len(rows), row_length])


def spans(lengths: Sequence[int], rows: Sequence[Row]) -> Iterator[tuple[int, int, slice]]:
    """`(place in the batch, row, columns)` of each sequence in these rows."""
    for row, places in enumerate(rows):
        start = 0
        for place in places:
            yield place, row, slice(start, start + lengths[place])
            start += lengths[place]


def columns_of(sequences: Sequence[TensorDict]) -> dict[str, torch.dtype]:
    """The per-token columns that all these sequences hold."""
    columns = {str(key): sequences[0][key].dtype for key in sorted(sequences[0].keys())}
    for place, sequence in enumerate(sequences):
        if odd := set(columns) ^ set(sequence.keys()):
            raise SchemaError(f"sequence {place}: `{min(odd)}` is in some sequences of the batch and not in others")
    return columns

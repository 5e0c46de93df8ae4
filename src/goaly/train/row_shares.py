"""Gives the rows of a batch, which are divided among the trainer's ranks, to a mesh with more or fewer ranks.

The trainer has one share of the rows for each data-parallel rank. Shares are dealt to the ranks of the other mesh in
rounds.

The minibatches of a batch hold the same groups on any number of ranks.

Invariant
    train-7: Every share goes to exactly one data-parallel rank. All ranks have the same number of rounds and rows, so
        they take part in every collective: a rank without a share in a round computes the first share as a dummy.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from goaly.backlog.trajectory_queue import TrajectoryQueue
    from goaly.train.model_engine import ModelEngine
    from goaly.trajectory import PackedRows


async def annotate(
    queue: "TrajectoryQueue",
    batch_id: int,
    key: str,
    engine: "ModelEngine",
    compute: "Callable[[PackedRows], Awaitable[Tensor]]",
    *,
    count: int,
) -> None:
    """Compute a column from the rows of a batch and add it; the queue holds the rows in `count` shares."""

    async def columns(packed: "PackedRows") -> "Mapping[str, Tensor]":
        return {key: await compute(packed)}

    await _annotate(queue, queue.rows, batch_id, engine, columns, count)


async def judge(
    queue: "TrajectoryQueue",
    batch_id: int,
    engine: "ModelEngine",
    compute: "Callable[[PackedRows], Awaitable[Mapping[str, Tensor]]]",
    *,
    count: int,
) -> None:
    """Compute a teacher's columns from the lessons of a batch and add them; the queue holds these in `count` shares."""
    await _annotate(queue, queue.lessons, batch_id, engine, compute, count)


async def rows(queue: "TrajectoryQueue", batch_id: int, engine: "ModelEngine", *, count: int) -> "PackedRows":
    """All rows of this rank as one share; no token of a dummy is trained."""
    import torch

    shares = [
        _untrained(packed) if number is None else packed
        async for number, packed in _shares(queue.rows, batch_id, engine, count)
    ]
    first = shares[0]
    sizes = [minibatch.rows for minibatch in first.minibatches] or [len(first.rows)]
    by_minibatch = zip(*(share.rows.split(sizes) for share in shares), strict=True)
    minibatches = tuple(replace(one, rows=one.rows * len(shares)) for one in first.minibatches)
    joined = torch.cat([rows for of_minibatch in by_minibatch for rows in of_minibatch])
    return replace(first, rows=joined, minibatches=minibatches)


async def _annotate(
    queue: "TrajectoryQueue",
    rows: Any,
    batch_id: int,
    engine: "ModelEngine",
    compute: "Callable[[PackedRows], Awaitable[Mapping[str, Tensor]]]",
    count: int,
) -> None:
    async for number, packed in _shares(rows, batch_id, engine, count):
        columns = await compute(packed)
        if number is not None and engine.leads:
            for key, column_RL in columns.items():
                await queue.annotate.call_one(batch_id, number, key, column_RL)


async def _shares(
    rows: Any, batch_id: int, engine: "ModelEngine", count: int
) -> AsyncIterator[tuple[int | None, "PackedRows"]]:
    """The share of this rank in each round of the `rows` of this endpoint, by number; None and a dummy where it has
    none (train-7)."""
    for first in range(0, count, engine.dp_ranks):
        number = first + engine.dp_rank
        dealt = number < count
        yield number if dealt else None, await rows.call_one(batch_id, number if dealt else 0)


def _untrained(packed: "PackedRows") -> "PackedRows":
    idle = packed.rows.clone()
    idle["trained"].zero_()
    return replace(packed, rows=idle)

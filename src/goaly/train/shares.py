"""A batch's rows for a mesh of its own size: the trainer's shares, dealt in rounds to more or fewer ranks.

Invariants
    SH-1  Every share is dealt to exactly one data-parallel rank, and all ranks go through as many rounds of as many
          rows: they take part in every collective. A rank without a share in a round stands in with the first one.
    SH-2  A rank's rows of several shares are divided into the batch's own parts: the same groups make each optimizer
          step on any number of ranks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from goaly.train.engine import ModelEngine
    from goaly.trajectory import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of the trainer's shares of a batch."""

    number: int
    packed: "PackedRows"
    dealt: bool
    """Whether it was dealt to this rank, or only stands in where there is none."""


async def annotate(
    queue: Any,
    batch_id: int,
    key: str,
    engine: "ModelEngine",
    compute: "Callable[[PackedRows], Awaitable[Tensor]]",
    *,
    count: int,
) -> None:
    """Add to all of the batch's rows, which the queue has in `count` shares, a column that is computed of them."""
    async for share in _shares(queue, batch_id, engine, count):
        column_RL = await compute(share.packed)
        if share.dealt and engine.leads:
            await queue.annotate.call_one(batch_id, share.number, key, column_RL)


async def rows(queue: Any, batch_id: int, engine: "ModelEngine", *, count: int) -> "PackedRows":
    """All rows of this rank as one share; those that only stand in have nothing to train."""
    dealt = [share async for share in _shares(queue, batch_id, engine, count)]
    return _joined([share.packed if share.dealt else _untrained(share.packed) for share in dealt])


async def _shares(queue: Any, batch_id: int, engine: "ModelEngine", count: int) -> AsyncIterator[Share]:
    for first in range(0, count, engine.dp_ranks):
        number = first + engine.dp_rank
        dealt = number < count
        packed = await queue.rows.call_one(batch_id, number if dealt else 0)
        yield Share(number=number, packed=packed, dealt=dealt)  # SH-1


def _joined(shares: Sequence["PackedRows"]) -> "PackedRows":
    import torch

    first = shares[0]
    sizes = [part.rows for part in first.parts] or [len(first.rows)]
    by_part = zip(*(share.rows.split(sizes) for share in shares), strict=True)  # SH-2
    parts = tuple(replace(part, rows=part.rows * len(shares)) for part in first.parts)
    return replace(first, rows=torch.cat([rows for of_part in by_part for rows in of_part]), parts=parts)


def _untrained(packed: "PackedRows") -> "PackedRows":
    idle = packed.rows.clone()
    idle["trained"].zero_()
    return replace(packed, rows=idle)

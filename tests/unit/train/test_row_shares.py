"""A batch's shares reach ranks of any number, each once, in as many rounds for all."""

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.train import row_shares
from goaly.trajectory import Minibatch
from tests.unit.train.batches import documents, pack


@dataclass
class Engine:
    dp_rank: int
    dp_ranks: int
    leads: bool = True


def queue_of(count: int) -> tuple[Any, list[Any], list[tuple[int, int, str, float]]]:
    """A queue with this number of shares; its rows, and each annotation: batch, share, key, the sum of the column."""
    packed = [pack(documents(2, seed=seed), rows=2, row_length=64) for seed in range(count)]
    annotated: list[tuple[int, int, str, float]] = []

    async def rows(batch_id: int, dp_rank: int) -> Any:
        return packed[dp_rank]

    async def annotate(batch_id: int, dp_rank: int, key: str, column: torch.Tensor) -> None:
        annotated.append((batch_id, dp_rank, key, float(column.sum())))

    queue = SimpleNamespace(rows=SimpleNamespace(call_one=rows), annotate=SimpleNamespace(call_one=annotate))
    return queue, packed, annotated


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 5), ranks=st.integers(1, 5))
def test_every_share_is_computed_and_annotated_once_and_all_ranks_work_alike(count: int, ranks: int):
    queue, packed, annotated = queue_of(count)
    computed = [0] * ranks

    async def run(rank: int, leads: bool) -> None:
        async def trained(share: Any) -> torch.Tensor:
            computed[rank] += 1
            return share.rows["trained"].float()

        await row_shares.annotate(queue, 7, "values", Engine(rank, ranks, leads), trained, count=count)

    for rank in range(ranks):
        asyncio.run(run(rank, leads=False))
    assert annotated == []
    assert len(set(computed)) == 1  # train-7
    for rank in range(ranks):
        asyncio.run(run(rank, leads=True))
    due = [(7, number, "values", float(share.rows["trained"].sum())) for number, share in enumerate(packed)]
    assert sorted(annotated) == due


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 5), ranks=st.integers(1, 5))
def test_all_ranks_get_as_many_rows_with_every_trained_token_once(count: int, ranks: int):
    queue, packed, _ = queue_of(count)
    found = [asyncio.run(row_shares.rows(queue, 0, Engine(rank, ranks), count=count)) for rank in range(ranks)]
    assert len({one.rows.batch_size for one in found}) == 1  # train-7
    trained = sum(int(one.rows["trained"].sum()) for one in found)
    assert trained == sum(int(share.rows["trained"].sum()) for share in packed)
    assert all(share.rows["trained"].any() for share in packed)  # standing in changed nothing at the queue


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 5), ranks=st.integers(1, 5))
def test_a_part_of_the_batch_is_one_part_of_all_shares_on_any_number_of_ranks(count: int, ranks: int):
    queue, packed, _ = queue_of(count)
    counts = [sum(int(share.rows["trained"][row].sum()) for share in packed) for row in range(2)]
    minibatches = tuple(Minibatch(rows=1, trained_tokens=tokens, sequences=count) for tokens in counts)
    packed[:] = [replace(share, minibatches=minibatches) for share in packed]
    found = [asyncio.run(row_shares.rows(queue, 0, Engine(rank, ranks), count=count)) for rank in range(ranks)]
    for number, of_ranks in enumerate(zip(*(one.split() for one in found), strict=True)):
        assert sum(int(step.rows["trained"].sum()) for step in of_ranks) == counts[number]
        assert {step.batch_trained_tokens for step in of_ranks} == {counts[number]}

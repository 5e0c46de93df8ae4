"""Queues of every kind for tests, and whether two are in the same state."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings

SETTINGS = BacklogSettings(groups_per_step=2, group_size=2, max_staleness=2, window=4, row_length=32)
KINDS = [
    SETTINGS,
    replace(SETTINGS, order="completion", length_correction="inverse_propensity"),
    replace(SETTINGS, dynamic_sampling=True, max_no_signal_share=0.99),
]


async def now(call: Any) -> Any:
    """The answer of a call that need not wait; None if it would."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        return None
    return task.result()


def assert_same(queue: GroupQueue, other: GroupQueue, open_batches: Iterable[int], *, loaded: bool = False) -> None:
    """Both tell the same, and have the same rows in these batches. One that was loaded knows less of its past."""
    assert queue.counts() == other.counts()
    assert queue.reasons() == other.reasons()
    assert queue.wait() == other.wait()
    assert loaded or queue.known_steps == other.known_steps
    for batch in open_batches:
        assert_same_rows(queue.rows(batch, 0).rows, other.rows(batch, 0).rows)


def assert_same_rows(rows: Any, others: Any) -> None:
    """Both have the same columns, to the last bit."""
    assert set(rows.keys()) == set(others.keys())
    for key in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        assert torch.equal(rows[key], others[key]), key

"""The state that a run's log leads to, and its trained batches."""

import asyncio
from pathlib import Path

import pytest
import torch
from trajectories import grouped, sampled

from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import CorruptLog
from goaly.journal.records import Drawn, Published
from goaly.journal.run_log import RunLog, RunState, recover, trained_batches
from goaly.prompts.prompt import Message, Prompt
from goaly.reward.settings import AdvantageSettings

SETTINGS = BacklogSettings(groups_per_step=2, group_size=2, max_staleness=2, window=4, row_length=32)


def queue_of(log: RunLog | None = None) -> GroupQueue:
    record = (lambda event: None) if log is None else log.record
    return GroupQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0, record=record)


def prompt(number: int) -> Prompt:
    return Prompt(id=f"p{number}", source="s", messages=(Message(role="user", content=str(number)),))


GROUP = [sampled(4), sampled(5, index=1, reward=1.0)]


def drawn(ticket: int, learned: int = 0) -> Drawn:
    return Drawn(ticket=ticket, prompt=prompt(ticket), mixture={"position": ticket + 1}, learned=learned)


async def admitted(log: RunLog, queue: GroupQueue, count: int, first: int = 0) -> None:
    for index in range(first, first + count):
        assert await asyncio.wait_for(queue.admit(), 1) is not None
        log.record(drawn(index))


async def test_the_mixture_learns_again_from_the_batches_since_the_last_draw(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    queue = queue_of(log)
    await admitted(log, queue, 4)
    for step in range(2):
        queue.report(grouped(2 * step, GROUP))
        queue.report(grouped(2 * step + 1, GROUP))
        batch = await queue.next_batch()
        assert batch is not None
        queue.trained(batch.id, batch.id + 1)
        await queue.admit()
        log.record(drawn(4 + step, learned=step))
    await log.durable()
    assert [len(passes) for passes in recover(tmp_path, RunState(queue_of()), 2).passes] == [1]
    log.close()


async def test_trained_batches_come_annotated_and_with_the_digest_of_their_version(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    queue = queue_of(log)
    await admitted(log, queue, 4)
    columns = []
    for step in range(2):
        queue.report(grouped(2 * step, GROUP))
        queue.report(grouped(2 * step + 1, GROUP))
        batch = await queue.next_batch()
        assert batch is not None
        columns.append(queue.rows(batch.id, 0).rows["tokens"] * torch.rand(()))
        queue.annotate(batch.id, 0, "reference_logprobs", columns[-1])
        log.record(Published(version=step + 1, digest=f"d{step + 1}")) if step == 0 else None
        queue.trained(batch.id, batch.id + 1)
    await log.durable()
    other = queue_of()
    found = []
    for batch, digest in trained_batches(tmp_path, other, first=0):
        assert torch.equal(other.rows(batch.id, 0).rows["reference_logprobs"], columns[batch.id])
        found.append((batch.id, digest))
        other.trained(batch.id, batch.id + 1)
    assert found == [(0, "d1"), (1, None)]
    assert [batch.id for batch, _ in trained_batches(tmp_path, queue_of(), first=1)] == [1]
    log.close()


async def test_a_record_that_cannot_be_understood_is_named(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append(lambda: [b"\x02\0\0\0\0\0\0\0{}"])
    await log.durable()
    with pytest.raises(CorruptLog, match="segment 0, offset "):
        recover(tmp_path, RunState(queue_of()), 0)
    log.close()

"""A queue that writes a log can be killed at any moment: another one goes on from the log."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from trajectories import grouped, sampled

from goaly.backlog.events import CANCELLED, Dropped
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import CorruptLog
from goaly.journal.logged_queue import LoggedQueue
from goaly.journal.records import Drawn, Published, Resumed
from goaly.journal.run_log import RunLog, RunState, recover, trained_batches
from goaly.prompts.prompt import Message, Prompt
from goaly.reward.settings import AdvantageSettings

SETTINGS = BacklogSettings(groups_per_step=2, group_size=2, max_staleness=2, window=4, row_length=32)


def queue_of(log: RunLog | None = None) -> GroupQueue:
    record = (lambda event: None) if log is None else log.append
    return GroupQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0, record=record)


def prompt(number: int) -> Prompt:
    return Prompt(id=f"p{number}", source="s", messages=(Message(role="user", content=str(number)),))


GROUP = [sampled(4), sampled(5, index=1, reward=1.0)]


def drawn(ticket: int, learned: int = 0) -> Drawn:
    return Drawn(ticket=ticket, prompt=prompt(ticket), mixture={"position": ticket + 1}, learned=learned)


async def admitted(log: RunLog, queue: GroupQueue, count: int, first: int = 0) -> None:
    for index in range(first, first + count):
        assert await asyncio.wait_for(queue.admit(), 1) is not None
        log.append(drawn(index))


async def test_a_log_leads_to_the_queue_and_to_the_tickets_under_way(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    queue = queue_of(log)
    await admitted(log, queue, 4)
    await queue.admit()
    queue.report(grouped(0, GROUP))
    queue.report(grouped(1, GROUP))
    queue.report(Dropped.failed(2, "broken"))
    assert await queue.next_batch() is not None
    await log.durable()

    other = queue_of()
    found = recover(tmp_path, RunState(other), 0)
    assert other.counts() == queue.counts()
    assert {ticket: one.id for ticket, one in found.prompts.items()} == {3: "p3"}
    assert found.mixture == {"position": 4}
    again = [await asyncio.wait_for(other.admit(), 1) for _ in range(2)]
    assert [ticket.index for ticket in again if ticket is not None] == [3, 4]  # before a new one
    assert (await asyncio.wait_for(other.admit(), 1)) == (await asyncio.wait_for(queue.admit(), 1))
    log.close()


async def test_a_log_that_was_resumed_leads_on(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    queue = queue_of(log)
    await admitted(log, queue, 3)
    queue.report(Dropped.failed(0, CANCELLED))
    await log.durable()
    log.append(Resumed(policy_version=0, trainer={}))
    second = queue_of(log)
    assert set(recover(tmp_path, RunState(second), 0).prompts) == {1, 2}
    second.report(grouped(1, GROUP))
    await log.durable()
    assert set(recover(tmp_path, RunState(queue_of()), 0).prompts) == {2}
    log.close()


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
        log.append(drawn(4 + step, learned=step))
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
        log.append(Published(version=step + 1, digest=f"d{step + 1}")) if step == 0 else None
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
    log._writer.append(lambda: [b"\x02\0\0\0\0\0\0\0{}"])
    await log.durable()
    with pytest.raises(CorruptLog, match="segment 0, offset "):
        recover(tmp_path, RunState(queue_of()), 0)
    log.close()


async def call(queue: LoggedQueue, endpoint: str, *arguments: Any) -> Any:
    """The actor's own code without Monarch around it."""
    return await getattr(LoggedQueue, endpoint)._method.__wrapped__(queue, *arguments)


async def test_ranks_that_lost_their_state_get_every_batch_once_more_also_one_that_is_trained_meanwhile(
    tmp_path: Path,
) -> None:
    actor = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0)
    await call(actor, "open", tmp_path, 0, {})
    rows = []
    for step in range(3):
        for _ in range(2):
            ticket = await asyncio.wait_for(call(actor, "admit"), 1)
            await call(actor, "report", grouped(ticket.index, GROUP))
        batch = await call(actor, "next_batch")
        rows.append((await call(actor, "rows", batch.id, 0)).rows["tokens"])
        if step < 2:
            await call(actor, "trained", batch.id, batch.id + 1)

    first, _ = await call(actor, "replayed", "critic-1", tmp_path, 0)
    other, _ = await call(actor, "replayed", "trainer-1", tmp_path, 1)
    assert (first.id, other.id) == (0, 1)
    await call(actor, "trained", 2, 3)  # by the trainer, while the critic catches up
    for batch in (0, 1, 2):
        assert torch.equal((await call(actor, "rows", batch, 0)).rows["tokens"], rows[batch])
        found = await call(actor, "replayed", "critic-1", tmp_path, 0)
        assert (found is None) == (batch == 2)
    with pytest.raises(ValueError, match="unknown batch 0; open batches: none"):
        await call(actor, "rows", 0, 0)  # nobody reads it any more
    await call(actor, "end_replay", "critic-1")
    await call(actor, "end_replay", "trainer-1")
    await call(actor, "settle")


async def test_the_rows_of_a_batch_that_is_being_read_again_are_not_given_out_half_made(tmp_path: Path) -> None:
    actor = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0)
    await call(actor, "open", tmp_path, 0, {})
    for _ in range(2):
        ticket = await asyncio.wait_for(call(actor, "admit"), 1)
        await call(actor, "report", grouped(ticket.index, GROUP))
    batch = await call(actor, "next_batch")
    column = (await call(actor, "rows", 0, 0)).rows["tokens"] * 0.5
    await call(actor, "annotate", 0, 0, "reference_logprobs", column)
    await call(actor, "trained", batch.id, 1)
    await call(actor, "replayed", "one", tmp_path, 0)
    other = actor._replays["one"]
    other.current = None  # as while its next batch is made
    other._queue._batches[0].ranks[0].rows.pop("reference_logprobs", None)
    await call(actor, "replayed", "two", tmp_path, 0)
    assert "reference_logprobs" in (await call(actor, "rows", 0, 0)).rows.keys()  # noqa: SIM118
    await call(actor, "settle")

"""What the queue's actor writes into the run's log, and what it says while the disk does not take it."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from queues import now
from trajectories import grouped, sampled

from goaly.backlog.events import Ticket
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import Wait
from goaly.backlog.settings import BacklogSettings
from goaly.journal import log_writer, logged_queue
from goaly.journal.logged_queue import LoggedQueue, _Replay
from goaly.journal.records import Published, Snapshot
from goaly.journal.run_log import delete_before, needed_records, records, trainers
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group

SETTINGS = BacklogSettings(groups_per_step=1, group_size=2, max_staleness=1, window=2, row_length=32)


def group(ticket: Ticket) -> Group:
    least = ticket.min_version
    return grouped(ticket.index, [sampled(4, version=least), sampled(5, index=1, reward=1.0, version=least)])


def call(queue: LoggedQueue, endpoint: str, *arguments: Any) -> Any:
    """What the actor does when this endpoint is called."""
    return getattr(LoggedQueue, endpoint)._method.__wrapped__(queue, *arguments)


async def opened(folder: Path, version: int = 0, **settings: Any) -> LoggedQueue:
    queue = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0, **settings)
    await call(queue, "open", folder, version, {})
    return queue


async def given(queue: LoggedQueue) -> Any:
    """The batch of one group that is admitted and complete."""
    ticket = await asyncio.wait_for(queue.queue.admit(), 1)
    assert ticket is not None
    queue.queue.report(group(ticket))
    batch = await asyncio.wait_for(call(queue, "next_batch"), 20)
    assert batch is not None
    return batch


async def step(queue: LoggedQueue) -> None:
    """Admit, complete and train one group."""
    batch = await given(queue)
    await call(queue, "trained", batch.id, batch.id + 1)


async def test_the_next_queue_of_a_training_loop_that_goes_on_gives_out_only_what_that_has_not(tmp_path: Path) -> None:
    queue = await opened(tmp_path, steps=4)
    await step(queue)
    for _ in range(2):
        ticket = await queue.queue.admit()
        assert ticket is not None
        queue.queue.report(group(ticket))
    given = await call(queue, "next_batch")
    await call(queue, "annotate", given.id, 0, "values", queue.queue.rows(given.id, 0).rows["advantages"] * 0 + 3)
    lost = await call(queue, "next_batch")  # its answer is lost with the queue
    await call(queue, "settle")

    following = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0, steps=4)
    await call(following, "open", tmp_path, 1, {}, given.id + 1)
    assert (await call(following, "next_batch")).id == lost.id  # backlog-9
    assert bool((following.queue.rows(given.id, 0).rows["values"] == 3).any())  # journal-5
    await call(following, "trained", given.id, 2)
    await call(following, "trained", lost.id, 3)
    assert following.queue.counts()["trained"] == 3
    await call(following, "settle")


async def test_a_column_is_on_disk_before_its_rank_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # journal-5
    queue, disk = await opened(tmp_path), threading.Event()
    batch = await given(queue)
    values = queue.queue.rows(batch.id, 0).rows["advantages"]
    monkeypatch.setattr(log_writer.os, "fdatasync", lambda file: disk.wait(30))
    annotating = asyncio.ensure_future(call(queue, "annotate", batch.id, 0, "values", values))
    await asyncio.sleep(0.05)
    assert not annotating.done()
    disk.set()
    await asyncio.wait_for(annotating, 20)
    await call(queue, "settle")


async def test_the_actor_ends_after_its_steps_and_divides_its_batches(tmp_path: Path) -> None:
    two = replace(SETTINGS, groups_per_step=2, window=4)
    queue = LoggedQueue(two, AdvantageSettings(), dp_ranks=1, pad_token=0, steps=1, minibatches=2)
    await call(queue, "open", tmp_path, 0, {})
    for _ in range(2):
        ticket = await now(queue.queue.admit())
        queue.queue.report(group(ticket))
    assert await now(queue.queue.admit()) is None
    batch = await call(queue, "next_batch")
    assert [minibatch.sequences for minibatch in (await call(queue, "rows", batch.id, 0)).minibatches] == [2, 2]
    assert 0 <= batch.metrics["log/cpu_seconds"] < 60
    await call(queue, "settle")


async def test_batches_that_were_not_trained_are_replayed_from_the_queue(tmp_path: Path) -> None:
    queue = await opened(tmp_path)
    before = []
    for batch in range(3):
        await given(queue)
        before.append(queue.queue.rows(batch, 0))
        if batch == 0:
            await call(queue, "trained", 0, 1)
    for batch, rows in enumerate(before):
        found = await call(queue, "replayed", "reader", tmp_path, 0)
        assert found is not None
        assert (found[0].id, found[1]) == (batch, None)
        again = await call(queue, "rows", batch, 0)
        assert torch.equal(again.rows["tokens"], rows.rows["tokens"])
        with pytest.raises((ValueError, IndexError)):
            await call(queue, "rows", batch, 1)
    assert await call(queue, "replayed", "reader", tmp_path, 0) is None
    assert await call(queue, "replayed", "other", tmp_path, 3) is None
    await call(queue, "settle")


async def test_what_a_dead_queue_had_not_written_of_published_versions_is_before_the_batches_that_made_them(
    tmp_path: Path,
) -> None:
    queue = await opened(tmp_path)
    ticket = await queue.queue.admit()
    assert ticket is not None
    queue.queue.report(group(ticket))
    await call(queue, "next_batch")  # its step is done, but neither its end nor the version are recorded
    await call(queue, "settle")
    next_queue = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0)
    await call(next_queue, "open", tmp_path, 1, {}, 1, [Published(version=1, digest="d1")])
    batch, digest = await call(next_queue, "replayed", "reader", tmp_path, 0)
    assert (batch.id, digest) == (0, "d1")
    await call(next_queue, "settle")


async def test_a_queue_without_a_log_gives_out_batches() -> None:
    queue = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0)
    await step(queue)
    assert queue.queue.counts()["trained"] == 1


def snapshots(folder: Path) -> list[int]:
    return [one.policy_version for one in records(folder) if isinstance(one, Snapshot)]


async def test_a_resumed_run_reads_from_the_newest_snapshot_that_its_trainer_can_use(tmp_path: Path) -> None:
    queue = await opened(tmp_path, snapshot_every=2)
    for _ in range(5):
        await step(queue)
    await call(queue, "settle")
    assert snapshots(tmp_path) == [2, 4]
    needed = {version: len(list(needed_records(tmp_path, version))) for version in (1, 2, 4, 5)}
    assert needed[1] > needed[2] > needed[4] == needed[5]
    resumed = await opened(tmp_path, 3, snapshot_every=2)
    assert resumed.queue.counts()["policy_version"] == 5
    for batch_id in (3, 4):
        batch = await call(resumed, "next_batch")
        assert batch.id == batch_id
        await call(resumed, "trained", batch.id, batch.id + 1)
    await call(resumed, "settle")
    assert snapshots(tmp_path) == [2, 4]  # none while batches were trained again


async def test_the_settings_of_the_trainer_that_goes_on_are_known_when_the_log_before_it_is_gone(
    tmp_path: Path,
) -> None:
    queue = await opened(tmp_path, snapshot_every=1)
    await step(queue)
    await call(queue, "settle")
    resumed = LoggedQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0, snapshot_every=1)
    await call(resumed, "open", tmp_path, 1, {"lr": 2.0})
    await step(resumed)
    await call(resumed, "settle")
    delete_before(tmp_path, 2)
    assert [(one.policy_version, one.trainer) for one in trainers(tmp_path)] == [(1, {"lr": 2.0})]


async def test_once_the_end_of_a_run_has_begun_there_is_no_snapshot_of_what_this_end_cancels(tmp_path: Path) -> None:
    queue = await opened(tmp_path, snapshot_every=1)
    batch = await given(queue)
    queue.queue.close()
    await call(queue, "trained", batch.id, 1)
    await call(queue, "settle")
    assert snapshots(tmp_path) == []


async def test_a_stalled_disk_is_what_the_next_batch_is_said_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged_queue, "DISK_SECONDS", 0.03)
    queue, disk = await opened(tmp_path), threading.Event()
    await call(queue, "durable")
    ticket = await queue.queue.admit()
    assert ticket is not None
    waiting = asyncio.create_task(call(queue, "next_batch"))
    await asyncio.sleep(0.05)
    assert (await call(queue, "wait")).disk_file is None  # it waits for the group
    monkeypatch.setattr(log_writer.os, "fdatasync", lambda file: disk.wait(30))
    queue.queue.report(group(ticket))
    async with asyncio.timeout(20):
        while (wait := await call(queue, "wait")).disk_file is None:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    assert wait.disk_file == tmp_path / "000000.log"
    assert wait.disk_seconds >= logged_queue.DISK_SECONDS
    disk.set()
    assert (await waiting).id == 0
    assert (await call(queue, "wait")).disk_file is None
    await call(queue, "settle")


def test_a_wait_for_the_disk_names_the_file_and_the_seconds() -> None:
    groups = "3 complete groups wait for a batch of 8; 2 groups were rejected, 1 failed so far"
    wait = Wait(ticket=None, finished=3, needed=8, rejected=2, failed=1)
    assert str(wait) == groups
    wait = Wait(
        ticket=4, finished=3, needed=8, rejected=2, failed=1, disk_seconds=44.4, disk_file=Path("log/000003.log")
    )
    assert str(wait) == f"the next batch waits 44 s for the disk to write log/000003.log; {groups}"


async def test_a_reader_whose_first_batch_was_not_recorded_gets_it_from_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goaly.journal.logged_queue.trained_batches", lambda *_, **__: iter(()))
    handle = SimpleNamespace(id=3)
    replay = _Replay(
        tmp_path / "log",
        GroupQueue(SETTINGS, AdvantageSettings(), dp_ranks=1, pad_token=0),
        3,
        {3: SimpleNamespace(handle=handle)},
    )
    assert await replay.next() == (handle, None)
    assert replay.current == 3
    assert await replay.next() is None


async def test_ranks_that_lost_their_state_get_every_batch_once_more_also_one_that_is_trained_meanwhile(
    tmp_path: Path,
) -> None:
    queue, rows = await opened(tmp_path), []
    for number in range(3):
        batch = await given(queue)
        rows.append(queue.queue.rows(batch.id, 0).rows["tokens"])
        if number < 2:
            await call(queue, "trained", batch.id, batch.id + 1)
    first, _ = await call(queue, "replayed", "critic-1", tmp_path, 0)
    other, _ = await call(queue, "replayed", "trainer-1", tmp_path, 1)
    assert (first.id, other.id) == (0, 1)
    await call(queue, "trained", 2, 3)  # by the trainer, while the critic catches up
    for number in range(3):
        assert torch.equal((await call(queue, "rows", number, 0)).rows["tokens"], rows[number])
        found = await call(queue, "replayed", "critic-1", tmp_path, 0)
        assert (found is None) == (number == 2)
    with pytest.raises(ValueError, match="unknown batch 0; open batches: none"):
        await call(queue, "rows", 0, 0)  # nobody reads it any more
    await call(queue, "end_replay", "critic-1")
    await call(queue, "end_replay", "trainer-1")
    await call(queue, "settle")


async def test_the_rows_of_a_batch_that_is_being_read_again_are_not_given_out_half_made(tmp_path: Path) -> None:
    queue = await opened(tmp_path)
    batch = await given(queue)
    column = queue.queue.rows(0, 0).rows["tokens"] * 0.5
    await call(queue, "annotate", 0, 0, "reference_logprobs", column)
    await call(queue, "trained", batch.id, 1)
    await call(queue, "replayed", "one", tmp_path, 0)
    other = queue._replays["one"]
    other.current = None  # as while its next batch is made
    other._queue._batches[0].ranks[0].rows.pop("reference_logprobs", None)
    await call(queue, "replayed", "two", tmp_path, 0)
    assert "reference_logprobs" in (await call(queue, "rows", 0, 0)).rows.keys()  # noqa: SIM118
    await call(queue, "settle")

"""Conversations are removed from a log, and the queue that it leads to stays in the same state."""

import asyncio
from pathlib import Path

import pytest
import torch
from trajectories import grouped, sampled

from goaly.backlog.events import Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import RunFailed
from goaly.journal.records import Snapshot
from goaly.journal.redaction import FORGOTTEN, redact
from goaly.journal.run_log import RunLog, RunState, needed_records, records, trained_batches
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group

BACKLOG = BacklogSettings(groups_per_step=1, group_size=2, max_staleness=4, window=1, row_length=64)
SECRET = 77
"""A token that only the conversation to remove has."""


def queue() -> GroupQueue:
    return GroupQueue(BACKLOG, AdvantageSettings(), dp_ranks=1, pad_token=0)


async def written(log: Path) -> None:
    """Three batches of two conversations each; ann's are in the first and the third, which is queued. A snapshot after
    the first."""
    file = RunLog(log)
    made = GroupQueue(BACKLOG, AdvantageSettings(), dp_ranks=1, pad_token=0, record=lambda one: record(one))
    state = RunState(made)

    def record(one: object) -> None:
        file.record(one)
        state.follow(one)

    for ticket in range(3):
        await made.admit()
        names = ("ann", "bob") if ticket != 1 else ("bob", "cid")
        samples = [
            sampled(6, reward=float(number), tokens=[5, *[SECRET if name == "ann" else 9] * 5], prompt_id=name)
            for number, name in enumerate(names)
        ]
        made.report(grouped(ticket, samples))
        if ticket < 2:
            batch = await made.next_batch()
            assert batch is not None
            made.trained(batch.id, batch.id + 1)
        if ticket == 0:
            file.record(state.snapshot())
    file.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    asyncio.run(written(tmp_path / "log"))
    return tmp_path / "log"


def groups(log: Path) -> list[Group]:
    found = []
    for record in records(log):
        found += [one for one in (record.records if isinstance(record, Snapshot) else (record,))]
    return [one for one in found if isinstance(one, Group)]


def test_a_conversation_loses_its_tokens_and_nothing_else_changes(log: Path):
    before, kinds = groups(log), [type(one) for one in records(log)]
    assert redact(log, {"ann"}) == sum(one.prompt_id == "ann" for group in before for one in group.samples) == 2
    after = groups(log)
    assert [type(one) for one in records(log)] == kinds
    for group, other in zip(before, after, strict=True):
        assert group.rewards == other.rewards
        for sample, changed in zip(group.samples, other.samples, strict=True):
            assert len(sample) == len(changed)
            if sample.prompt_id == "ann":
                assert changed.prompt_id == FORGOTTEN
                assert changed.tokens["tokens"].count_nonzero() == 0
                assert not changed.tokens["trained"].any()
            else:
                assert all(torch.equal(sample.tokens[key], changed.tokens[key]) for key in ("tokens", "trained"))
    content = b"".join(path.read_bytes() for path in log.glob("*.log"))
    assert b"ann" not in content
    assert torch.tensor([SECRET] * 5, dtype=torch.int32).numpy().tobytes() not in content


def test_a_replay_trains_the_same_batches_without_the_conversation(log: Path):
    redact(log, {"ann"})
    replayed = queue()
    steps = []
    for handle, _ in trained_batches(log, replayed, first=0):
        steps.append((handle.id, int(replayed.rows(handle.id, 0).rows["trained"].sum())))
    assert steps == [(0, 5), (1, 10)]


def test_a_run_resumes_from_the_log_with_the_conversation_gone_from_its_queue(log: Path):
    redact(log, {"ann"})
    resumed = queue()
    for _ in RunState(resumed).replay(needed_records(log, 2), keep=2):
        pass
    assert resumed.counts()["queued"] == 1
    assert resumed.counts()["trained"] == 2
    (waiting,) = resumed._groups.values()
    assert [one.prompt_id for one in waiting.samples] == [FORGOTTEN, "bob"]
    assert [one.batch for one in records(log, of=Trained)] == [0, 1]


def test_a_log_without_the_conversation_stays_as_it_is(log: Path):
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    assert redact(log, {"nobody"}) == 0
    assert {path.name: path.read_bytes() for path in log.iterdir()} == before
    assert [path.name for path in log.parent.iterdir()] == ["log"]


def test_the_log_of_a_run_under_way_is_refused(log: Path):
    running = RunLog(log)
    with pytest.raises(RunFailed, match="another process still writes this log"):
        redact(log, {"ann"})
    running.close()

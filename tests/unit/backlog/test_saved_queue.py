"""What a saved queue brings back, and what a queue tells of its waits."""

import json
import logging

import pytest
import torch
from queues import KINDS, SETTINGS, assert_same, now
from trajectories import grouped, sampled

from goaly.backlog import group_statistics
from goaly.backlog.distribution import LengthDistribution
from goaly.backlog.events import Dropped
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import GroupStatistics, QueueWaits
from goaly.backlog.settings import BacklogSettings
from goaly.reward.settings import AdvantageSettings


def queue_of(settings: BacklogSettings) -> GroupQueue:
    return GroupQueue(settings, AdvantageSettings(), dp_ranks=1, pad_token=0)


async def admit(queue: GroupQueue, count: int) -> None:
    for _ in range(count):
        assert await now(queue.admit()) is not None


def complete(queue: GroupQueue, ticket: int, length: int, source: str = "test") -> None:
    samples = [sampled(length, reward=1.0), sampled(3, index=1)]
    queue.report(grouped(ticket, samples, source=source))


async def test_a_saved_batch_comes_back_with_its_weights_passes_and_later_columns() -> None:  # backlog-8
    queue = queue_of(KINDS[1])
    await admit(queue, 6)
    for ticket, length in enumerate((4, 4, 4, 32, 4, 32)):
        complete(queue, ticket, length, source="sums" if ticket < 5 else "words")
    formed = [(await now(queue.next_batch())).id for _ in range(3)]
    advantages = [queue.rows(batch, 0).rows["advantages"].abs().max() for batch in formed]
    assert len({round(float(most), 4) for most in advantages}) > 1  # groups weigh differently
    queue.annotate(1, 0, "reference_logprobs", queue.rows(1, 0).rows["advantages"] * 3)
    state = queue.state_dict()
    assert state is not None
    loaded = queue_of(KINDS[1])
    plain = {name: value for name, value in state.items() if name not in ("groups", "annotated")}
    loaded.load_state_dict(state | json.loads(json.dumps(plain)))
    assert_same(queue, loaded, formed, loaded=True)
    assert torch.equal(loaded.rows(1, 0).rows["reference_logprobs"], queue.rows(1, 0).rows["advantages"] * 3)
    assert [loaded.handle(batch).passes for batch in formed] == [queue.handle(batch).passes for batch in formed]
    assert {source: passes.passed for source, passes in loaded.handle(2).passes.items()} == {}
    assert {source: passes.passed for source, passes in loaded.handle(0).passes.items()} == {"sums": 5, "words": 1}


def followed(distribution: LengthDistribution, index: int) -> dict[str, float]:
    """The metrics after one more batch of one group."""
    distribution.admit(index)
    distribution.finish(index, [4 + index])
    distribution.deliver([index])
    return distribution.metrics()


def test_a_loaded_distribution_repeats_what_is_known_and_tells_each_step_once() -> None:
    settings = BacklogSettings(groups_per_step=1, window=1)
    first, loaded = LengthDistribution(settings), LengthDistribution(settings)
    for index in range(3):
        followed(first, index)
    state = first.state_dict()
    assert (state["known_before"], len(state["known"]), state["told"]) == (2, 1, 1)
    loaded.load_state_dict(json.loads(json.dumps(state)))
    assert loaded.metrics() == first.metrics() != {}
    assert followed(loaded, 3) == followed(first, 3)
    assert "distribution/step_tv" in followed(loaded, 4)


async def test_a_dropped_ticket_holds_no_measured_step_back() -> None:
    queue = queue_of(SETTINGS)
    await admit(queue, 3)
    queue.report(Dropped.failed(0, "broken"))
    assert [queue.state(ticket).value for ticket in (0, 1)] == ["failed", "running"]
    complete(queue, 1, 4)
    complete(queue, 2, 5)
    metrics = (await now(queue.next_batch())).metrics
    assert metrics["distribution/known_step"] == 1
    assert 0 <= metrics["queue/wait_seconds_mean"] <= metrics["queue/wait_seconds_max"] < 60


async def test_a_second_report_of_a_ticket_is_told_with_what_became_of_the_first(caplog) -> None:
    caplog.set_level(logging.INFO)
    queue = queue_of(SETTINGS)
    await admit(queue, 2)
    assert queue.report(Dropped.failed(0, "broken"))
    assert not queue.report(Dropped.rejected(0, "too late"))
    complete(queue, 1, 4)
    assert not queue.report(grouped(1, [sampled(4, reward=1.0), sampled(4, index=1)]))
    assert caplog.messages == [
        "ticket 0 is already failed; not rejected: too late",
        "ticket 1 is already queued; not a group",
    ]


async def test_a_batch_of_a_single_sample_is_formed() -> None:
    queue = queue_of(BacklogSettings(groups_per_step=1, group_size=1, row_length=32))
    await admit(queue, 1)
    queue.report(grouped(0, [sampled(4, reward=1.0)]))
    batch = await now(queue.next_batch())
    assert (batch.sequences, batch.trained_tokens) == (1, 3)
    assert queue.rows(batch.id, 0).rows["trained"].sum() == 3


def test_each_wait_for_a_batch_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, clock = [], iter([5_000_000_000, 6_000_000_000, 9_000_000_000])
    monkeypatch.setattr(group_statistics.time, "time_ns", lambda: next(clock))
    monkeypatch.setattr(
        group_statistics.spans, "record", lambda name, start, stop, **args: seen.append((name, start, stop, args))
    )
    measured = QueueWaits()
    measured.begin([0])
    measured.begin([1])
    assert measured.end([0, 1]) == {"queue/wait_seconds_mean": 3.5, "queue/wait_seconds_max": 4.0}
    assert seen == [
        ("queue_wait", 5_000_000_000, 9_000_000_000, {"ticket": 0}),
        ("queue_wait", 6_000_000_000, 9_000_000_000, {"ticket": 1}),
    ]


def test_what_was_counted_in_episodes_outlives_the_hub() -> None:
    first, loaded = (GroupStatistics(SETTINGS) for _ in range(2))
    first.count_dropped(Dropped.failed(0, "broken", {"tools/timeouts": 2}))
    loaded.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert loaded.take_counts()["tools/timeouts"] == 2.0

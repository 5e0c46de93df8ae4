"""A queue that replays another one's recorded events is in the same state, and goes on as the other one would."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from queues import KINDS, SETTINGS, assert_same, now
from trajectories import grouped, sampled

from goaly.backlog.events import Dropped, Event, Formed, Ticket, Trained
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import RECENT_STEPS
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import RunFailed
from goaly.reward.settings import AdvantageSettings


def queue_of(settings: BacklogSettings, events: list[Event] | None = None, dp_ranks: int = 1) -> GroupQueue:
    record = (lambda event: None) if events is None else events.append
    return GroupQueue(settings, AdvantageSettings(), dp_ranks=dp_ranks, pad_token=0, record=record)


class Driver:
    """Takes the steps of a run at random."""

    def __init__(self, queue: GroupQueue, running: list[Ticket] | None = None, formed: list[int] | None = None):
        self.queue = queue
        self.running = running or []
        self.formed = formed or []

    def running_in_order(self) -> list[Ticket]:
        return sorted(self.running, key=lambda ticket: ticket.index)

    async def step(self, what: int, choice: int) -> None:
        """Admit, complete, drop, form or train, if that is possible now."""
        match what:
            case 0 if (ticket := await now(self.queue.admit())) is not None:
                self.running.append(ticket)
            case 1 if self.running:
                ticket = self.running.pop(choice % len(self.running))
                rewards = (0.0, float(choice % 2))
                samples = [
                    sampled(3 + choice % 5 * (at + 1), index=at, reward=reward, version=ticket.min_version)
                    for at, reward in enumerate(rewards)
                ]
                self.queue.report(grouped(ticket.index, samples))
            case 2 if self.running:
                self.queue.report(Dropped.failed(self.running.pop(choice % len(self.running)).index, "broken"))
            case 3 if (batch := await now(self.queue.next_batch())) is not None:
                self.formed.append(batch.id)
            case 4 if self.formed:
                batch_id = self.formed.pop(0)
                self.queue.trained(batch_id, batch_id + 1)


CHOSEN = random.Random(77)
BUSY = [
    (CHOSEN.choice([0, 0, 1, 1, 2, 3, 4] if CHOSEN.random() < 0.8 else [0, 1, 1, 3]), CHOSEN.randrange(10))
    for _ in range(90)
]
"""Steps after which each kind of queue has running, dropped and finished tickets, and batches under way and trained."""
STEPS = st.lists(st.tuples(st.sampled_from([0, 0, 1, 1, 2, 3, 4]), st.integers(0, 9)), max_size=60)


@pytest.mark.parametrize("settings", KINDS, ids=["windowed", "completion", "dynamic"])
@given(before=STEPS, after=STEPS)
@example(before=BUSY, after=BUSY)
@example(before=BUSY[:45], after=BUSY)
async def test_a_queue_that_replays_the_events_of_another_goes_on_like_it(settings, before, after) -> None:
    events: list[Event] = []
    first = Driver(queue_of(settings, events))
    for step in before:
        await first.step(*step)
    second = Driver(queue_of(settings), list(first.running), list(first.formed))
    for event in events:
        second.queue.replay(event)
    assert_same(first.queue, second.queue, first.formed)  # backlog-8
    for step in after:
        await first.step(*step)
        await second.step(*step)
    assert_same(first.queue, second.queue, first.formed)


@pytest.mark.parametrize("settings", KINDS, ids=["windowed", "completion", "dynamic"])
@given(before=STEPS, after=STEPS)
@example(before=BUSY, after=BUSY)
@example(before=BUSY[:45], after=BUSY)
async def test_a_queue_that_loads_the_saved_state_of_another_goes_on_like_it(settings, before, after) -> None:
    first = Driver(queue_of(settings))
    for step in before:
        await first.step(*step)
    state = first.queue.state_dict()
    assert state is not None
    loaded = queue_of(settings)
    plain = {name: value for name, value in state.items() if name not in ("groups", "annotated")}
    loaded.load_state_dict(state | json.loads(json.dumps(plain)))
    second = Driver(loaded, list(first.running), list(first.formed))
    seen = len(first.queue.known_steps) - len(loaded.known_steps)
    for step in after:
        await first.step(*step)
        await second.step(*step)
    assert first.queue.known_steps[seen:] == loaded.known_steps
    loaded._distribution._known[:0] = first.queue.known_steps[:seen]
    assert_same(first.queue, loaded, first.formed)  # backlog-8
    assert [loaded.handle(batch) for batch in first.formed] == [first.queue.handle(batch) for batch in first.formed]


async def test_an_event_that_does_not_follow_from_those_before_is_refused() -> None:
    queue = queue_of(SETTINGS)
    with pytest.raises(ValueError, match=r"the log has Ticket\(index=1.*lead to Ticket\(index=0"):
        queue.replay(Ticket(index=1, min_version=0))
    with pytest.raises(ValueError, match="batch 0: its groups are not complete"):
        queue_of(SETTINGS).replay(Formed(batch=0, tickets=(0, 1)))


@pytest.mark.parametrize("settings", KINDS, ids=["windowed", "completion", "dynamic"])
@given(before=STEPS, after=STEPS, behind=st.integers(0, 3))
@example(before=BUSY, after=BUSY, behind=2)
async def test_a_restarted_queue_gives_out_again_what_was_not_done_and_then_goes_on_like_the_first(
    settings, before, after, behind: int
) -> None:
    events: list[Event] = []
    first = Driver(queue_of(settings, events))
    for step in before:
        await first.step(*step)
    newest = first.queue.counts()["policy_version"]
    version = max(0, newest - behind)
    second = queue_of(settings)
    for event in events:
        second.replay(event, keep=version)
    second.restart(version)
    formed = [*range(version, newest), *first.formed]
    rows = [second.rows(batch, 0).rows.clone() for batch in formed]
    again = [await now(second.next_batch()) for _ in formed]
    assert [batch.id for batch in again] == formed  # backlog-9: in order, before a new one
    assert [await now(second.admit()) for _ in first.running] == first.running_in_order()  # backlog-9: each once
    for batch, before_it in zip(formed, rows, strict=True):
        assert torch.equal(second.rows(batch, 0).rows["tokens"], before_it["tokens"])
    for batch in range(version, newest):
        second.trained(batch, batch + 1)
    other = Driver(second, list(first.running), list(first.formed))
    assert_same(first.queue, second, first.formed)
    for step in after:
        await first.step(*step)
        await other.step(*step)
    assert_same(first.queue, second, first.formed)


async def test_a_step_that_was_done_and_not_recorded_is_recorded_at_the_restart() -> None:
    events: list[Event] = []
    first = Driver(queue_of(SETTINGS, events))
    for what in (0, 0, 1, 1, 3):
        await first.step(what, 1)
    again: list[Event] = []
    second = queue_of(SETTINGS, again)
    for event in events:
        second.replay(event, keep=1)
    second.restart(1)
    assert again == [Trained(batch=0, tickets=(0, 1))]
    assert second.counts()["trained"] == 2
    assert await now(second.next_batch()) is None
    with pytest.raises(ValueError, match="the trainer is at version 2, but the log ends at 1"):
        second.restart(2)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_annotated_batch_is_annotated_after_a_replay_on_any_number_of_ranks(ranks: int) -> None:
    events: list[Event] = []
    first = Driver(queue_of(SETTINGS, events, dp_ranks=2))
    for what in (0, 0, 1, 1, 3):
        await first.step(what, 1)
    for rank in range(2):
        rows = first.queue.rows(0, rank).rows
        first.queue.annotate(0, rank, "reference_logprobs", rows["tokens"] * 1.01)
    first.queue.trained(0, 1)
    again: list[Event] = []
    second = queue_of(SETTINGS, again, dp_ranks=ranks)
    for event in events:
        second.replay(event, keep=0)
    second.restart(0)
    for rank in range(ranks):
        rows = second.rows(0, rank).rows
        assert torch.equal(rows["reference_logprobs"], rows["tokens"] * 1.01)
        second.annotate(0, rank, "reference_logprobs", rows["reference_logprobs"])  # the script does it again
    second.trained(0, 1)
    assert again == []


async def test_a_run_that_ended_for_want_of_signal_can_be_resumed_with_another_verifier() -> None:
    settings = replace(SETTINGS, dynamic_sampling=True, max_no_signal_share=0.5)
    events: list[Event] = []
    queue = queue_of(settings, events)
    for _ in range(RECENT_STEPS * settings.groups_per_step):
        ticket = await asyncio.wait_for(queue.admit(), 1)
        assert ticket is not None
        queue.report(grouped(ticket.index, [sampled(4), sampled(5, index=1)]))
    with pytest.raises(RunFailed, match="had no signal"):
        await queue.admit()
    second = queue_of(settings)
    for event in events:
        second.replay(event, keep=0)
    second.restart(0)
    assert await asyncio.wait_for(second.admit(), 1) is not None


async def test_after_the_close_no_end_of_a_ticket_is_recorded() -> None:
    events: list[Event] = []
    queue = queue_of(SETTINGS, events)
    for _ in range(3):
        await queue.admit()
    queue.close()
    queue.report(Dropped.failed(0, "cancelled"))
    queue.report(grouped(1, [sampled(4), sampled(5, index=1, reward=1.0)]))
    assert events == [Ticket(index=index, min_version=0) for index in range(3)]
    assert queue.counts()["failed"] == 1


async def test_a_queue_tells_which_tickets_run_and_which_batches_are_open() -> None:
    driver = Driver(queue_of(SETTINGS))
    for what in (0, 0, 0, 0, 0, 1, 1, 3, 1, 1, 3):
        await driver.step(what, 0)
    assert [driver.queue.is_running(ticket) for ticket in range(6)] == [False] * 4 + [True, False]
    assert [list(driver.queue.open_batches(first)) for first in range(3)] == [[0, 1], [1], []]

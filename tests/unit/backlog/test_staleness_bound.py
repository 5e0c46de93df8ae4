"""The age of what is trained, over random schedules of the backlog itself: admission (AD), order (WO), ledger (LE)."""

import asyncio
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import sampled

from goaly.backlog.events import Dropped, Ticket
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.backlog.staleness import StalenessBound
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, Trajectory
from tests import virtual_time


class Fate(Enum):
    """What becomes of a ticket's episodes."""

    SIGNAL = auto()
    NO_SIGNAL = auto()
    REJECTED = auto()
    FAILED = auto()


@dataclass
class Course:
    """What one ticket went through; times are policy versions."""

    position: int
    min_version: int
    admitted: int
    staleness: int
    """The bound of admission at that time."""
    finished: int | None = None
    trained: int | None = None


@dataclass
class Schedule:
    """A run in virtual time: every ticket takes a drawn time and ends in a drawn way, its tokens as old as allowed."""

    config: BacklogSettings
    durations: list[float]
    fates: list[Fate]
    steps: int
    train_seconds: float
    known_length: bool = False
    tightened: list[int | None] = field(default_factory=lambda: [None])
    """The bound that admission gets after each step, over and over; None is that of the config."""
    courses: dict[int, Course] = field(default_factory=dict)
    ages: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def run(self) -> "Schedule":
        steps = self.steps if self.known_length else None
        self.staleness = self.config.max_staleness
        self.queue = GroupQueue(self.config, AdvantageSettings(), dp_ranks=1, pad_token=0, steps=steps)
        virtual_time.run(self._run())  # raises when all wait for each other
        return self

    @property
    def version(self) -> int:
        return self.queue.counts()["policy_version"]

    @property
    def trained(self) -> list[Course]:
        return [course for course in self.courses.values() if course.trained is not None]

    def fate(self, index: int) -> Fate:
        return self.fates[index % len(self.fates)]

    def overtakers(self, index: int) -> int:
        """Tickets admitted after this one that were trained by an earlier version, or though it never was."""
        trained = self.courses[index].trained
        last = math.inf if trained is None else trained
        later = (course.trained for other, course in self.courses.items() if other > index)
        return sum(version is not None and version < last for version in later)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect(tasks))
            for step in range(self.steps):
                batch = await self.queue.next_batch()
                assert batch is not None
                self.ages.append(batch.metrics["age/max"])
                for index, course in self.courses.items():
                    if batch.metrics.get(f"distribution/source/{index}"):
                        course.trained = step
                await asyncio.sleep(self.train_seconds)
                self.queue.trained(batch.id, batch.id + 1)
                bound = self.tightened[step % len(self.tightened)]
                self.queue.tighten(bound)
                self.staleness = self.config.max_staleness if bound is None else min(bound, self.config.max_staleness)
            self.counts = self.queue.settle()

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        while (ticket := await self.queue.admit()) is not None:
            counts = self.queue.counts()
            position = counts["admitted"] - 1 - counts["rejected"] - counts["failed"]
            self.courses[ticket.index] = Course(position, ticket.min_version, counts["policy_version"], self.staleness)
            tasks.create_task(self._group(ticket))

    async def _group(self, ticket: Ticket) -> None:
        await asyncio.sleep(self.durations[ticket.index % len(self.durations)])
        match self.fate(ticket.index):
            case Fate.REJECTED:
                self.queue.report(Dropped.rejected(ticket.index, "drawn"))
            case Fate.FAILED:
                self.queue.report(Dropped.failed(ticket.index, "drawn"))
            case fate:
                version, differs = ticket.min_version, float(fate is Fate.SIGNAL)
                samples = (sample(0, 0.0, version), sample(1, differs, version))
                name = str(ticket.index)  # as its source, metrics tell which batch it is in
                if self.queue.report(Group(ticket=ticket.index, prompt_id=name, source=name, samples=samples)):
                    self.courses[ticket.index].finished = self.version


@cache
def sample(index: int, reward: float, version: int) -> Trajectory:
    return sampled(2, index=index, reward=reward, version=version)


@st.composite
def schedules(draw, **fixed) -> Schedule:
    config = BacklogSettings(
        groups_per_step=draw(st.integers(1, 5)),
        group_size=2,
        max_staleness=fixed.get("max_staleness", draw(st.integers(0, 4))),
        window=draw(st.integers(1, 12)),
        order=fixed.get("order", "windowed"),
        dynamic_sampling=draw(st.booleans()),
        row_length=64,
    )
    heavy_tail = st.floats(0.0, 8.0).map(math.exp)
    fates = draw(st.lists(st.sampled_from([Fate.SIGNAL] * 4 + list(Fate)), min_size=1, max_size=20))
    return Schedule(
        config=config,
        durations=draw(st.lists(heavy_tail, min_size=1, max_size=40)),
        fates=[fate for drawn in fates for fate in (drawn, Fate.SIGNAL)],  # enough signal for dynamic sampling
        steps=draw(st.integers(1, 12)),
        train_seconds=draw(st.floats(0.0, 500.0)),
        known_length=draw(st.booleans()),
        tightened=draw(st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=6)),
    )


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_the_oldest_allowed_weights_never_make_a_trained_token_older_than_the_bound(schedule):
    config = schedule.run().config
    bound = config.max_staleness + math.ceil((config.window - 1) / config.groups_per_step)
    assert max(schedule.ages) <= config.max_age <= bound  # backlog-3: even a generator that is always at min_version
    assert max(schedule.ages) == max(course.trained - course.min_version for course in schedule.trained)


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_no_ticket_is_overtaken_by_a_window_or_more_and_none_starves(schedule):
    config = schedule.run().config
    for index, course in schedule.courses.items():
        if course.finished is not None:
            assert schedule.overtakers(index) <= config.window - 1  # backlog-4
        if course.trained is not None:
            assert course.trained * config.groups_per_step <= course.position + config.window - 1


@settings(max_examples=40, deadline=None)
@given(schedules(max_staleness=0))
def test_at_zero_staleness_nothing_is_admitted_before_the_version_it_needs(schedule):
    schedule.run()
    assert all(course.min_version == course.admitted for course in schedule.courses.values())
    assert all(course.min_version == course.trained for course in schedule.trained)


@settings(max_examples=40, deadline=None)
@given(schedules(order="completion"))
def test_in_completion_order_a_finished_group_waits_for_at_most_max_staleness_other_steps(schedule):
    staleness = schedule.run().config.max_staleness
    assert all(course.trained <= course.finished + staleness for course in schedule.trained)
    if staleness == 0:
        assert max(schedule.ages) == 0


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_admission_never_runs_further_ahead_nor_asks_for_weights_that_do_not_exist_yet(schedule):
    config = schedule.run().config
    for course in schedule.courses.values():
        assert course.position < (course.admitted + config.max_staleness + 1) * config.groups_per_step  # backlog-1
        assert course.min_version <= course.admitted


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_while_admission_is_tightened_groups_run_ahead_by_the_lower_bound(schedule):
    groups = schedule.run().config.groups_per_step
    for course in schedule.courses.values():
        assert course.position < (course.admitted + course.staleness + 1) * groups  # backlog-14
        assert course.min_version == max(0, course.position // groups - schedule.config.max_staleness)


@settings(max_examples=40, deadline=None)
@given(schedules() | schedules(order="completion"))
def test_every_ticket_is_accounted_for_and_what_is_dropped_is_replaced(schedule):
    counts, due = schedule.run().counts, schedule.steps * schedule.config.groups_per_step
    assert counts["trained"] == len(schedule.trained) == due
    assert counts["admitted"] == due + counts["rejected"] + counts["failed"]  # backlog-5
    trained = {schedule.fate(index) for index, course in schedule.courses.items() if course.trained is not None}
    assert trained <= ({Fate.SIGNAL} if schedule.config.dynamic_sampling else {Fate.SIGNAL, Fate.NO_SIGNAL})
    if schedule.known_length:
        assert max(course.position for course in schedule.courses.values()) < due
        assert not any(course.finished is not None and course.trained is None for course in schedule.courses.values())


def test_the_bound_is_reached_so_it_is_not_a_loose_one():
    config = BacklogSettings(groups_per_step=1, group_size=2, max_staleness=2, window=3)
    slow_third = [1.0, 1.0, 40.0, *[1.0] * 20]
    schedule = Schedule(config=config, durations=slow_third, fates=[Fate.SIGNAL], steps=6, train_seconds=1.0).run()
    assert sorted(range(6), key=lambda index: schedule.courses[index].trained) == [0, 1, 3, 4, 2, 5]
    assert schedule.courses[2].trained - schedule.courses[2].min_version == 4 == max(schedule.ages) == config.max_age


@pytest.mark.parametrize(
    ("position", "version", "is_open", "min_version"),
    [(0, 0, True, 0), (5, 0, True, 0), (6, 0, False, 1), (6, 1, True, 1), (8, 1, False, 2), (19, 9, True, 7)],
)
def test_admission_by_hand_for_two_groups_a_step_and_staleness_two(
    position, version, is_open, min_version
):  # backlog-2
    bound = StalenessBound(groups_per_step=2, max_staleness=2)
    assert bound.admits(position, version) is is_open
    assert bound.min_version(position) == min_version


def test_a_run_of_known_length_admits_no_more_than_it_trains():
    bound = StalenessBound(groups_per_step=2, max_staleness=8, steps=3)
    assert [bound.admits(position, 0) for position in (5, 6)] == [True, False]

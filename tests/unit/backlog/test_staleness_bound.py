"""The age of what is trained, over random schedules: admission (AD), order (WO) and ledger (LE) together."""

import heapq
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.admission import Admission
from goaly.backlog.ledger import Ledger, State
from goaly.backlog.order import order_of
from goaly.backlog.settings import BacklogSettings


@dataclass
class Schedule:
    """A run on a simulated clock: every ticket takes a drawn time, perhaps again and again, and ends in a drawn way."""

    config: BacklogSettings
    durations: list[float]
    retries: list[int]
    fates: list[State]
    steps: int
    train_seconds: float
    policy_version: int = 0
    delivered: list[int] = field(default_factory=list)
    position: dict[int, int] = field(default_factory=dict)
    min_version: dict[int, int] = field(default_factory=dict)
    version_at_admission: dict[int, int] = field(default_factory=dict)
    version_at_finish: dict[int, int] = field(default_factory=dict)
    trained_at: dict[int, int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    def run(self) -> "Schedule":
        admission = Admission.of(self.config)
        order = order_of(self.config)
        left: dict[int, int] = {}
        events: list[tuple[float, int, str]] = []
        now, training = 0.0, None
        while self.policy_version < self.steps:
            while admission.is_open(self.ledger.live, self.policy_version):
                position = self.ledger.live
                index = self.ledger.admit()
                order.admit(index)
                self.ledger.move(index, State.RUNNING)
                self.position[index], self.version_at_admission[index] = position, self.policy_version
                self.min_version[index] = admission.min_version(position)
                left[index] = self.retries[index % len(self.retries)]
                heapq.heappush(events, (now + self.durations[index % len(self.durations)], index, "end"))
            if training is None and (training := order.take(self.config.groups_per_step)) is not None:
                self.delivered += training
                heapq.heappush(events, (now + self.train_seconds, -1, "step"))
            assert events, f"deadlock at version {self.policy_version}: {self.ledger.counts()}"
            now, index, what = heapq.heappop(events)
            if what == "step":
                assert training is not None
                for trained in training:
                    self.trained_at[trained] = self.policy_version
                    self.ledger.move(trained, State.TRAINED)
                self.policy_version, training = self.policy_version + 1, None
            elif left[index] > 0:
                left[index] -= 1
                heapq.heappush(events, (now + self.durations[index % len(self.durations)], index, "end"))
            elif (fate := self.fates[index % len(self.fates)]) is State.QUEUED:
                self.ledger.move(index, fate)
                order.finish(index)
                self.version_at_finish[index] = self.policy_version
            else:
                self.ledger.move(index, fate, "drawn")
                order.drop(index)
        return self


@st.composite
def schedules(draw, **fixed) -> Schedule:
    config = BacklogSettings(
        groups_per_step=draw(st.integers(1, 5)),
        max_staleness=fixed.get("max_staleness", draw(st.integers(0, 4))),
        window=draw(st.integers(1, 12)),
        order=fixed.get("order", "windowed"),
    )
    heavy_tail = st.floats(0.0, 8.0).map(math.exp)
    fate = st.sampled_from([State.QUEUED] * 6 + [State.REJECTED, State.FAILED])
    fates = draw(st.lists(fate, min_size=1, max_size=40).filter(lambda drawn: State.QUEUED in drawn))
    return Schedule(
        config=config,
        durations=draw(st.lists(heavy_tail, min_size=1, max_size=40)),
        retries=draw(st.lists(st.integers(0, 2), min_size=1, max_size=10)),
        fates=fates,
        steps=draw(st.integers(1, 12)),
        train_seconds=draw(st.floats(0.0, 500.0)),
    )


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_the_oldest_allowed_weights_never_make_a_trained_token_older_than_the_bound(schedule):
    config = schedule.run().config
    bound = config.max_staleness + math.ceil((config.window - 1) / config.groups_per_step)
    ages = [version - schedule.min_version[index] for index, version in schedule.trained_at.items()]
    assert max(ages) <= config.max_age <= bound  # AD-4: even a generator that is always at min_version


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_no_ticket_is_overtaken_by_a_window_or_more_and_none_starves(schedule):
    schedule.run()
    window, place = schedule.config.window, {index: at for at, index in enumerate(schedule.delivered)}
    for index, at in place.items():
        overtakers = [other for other in schedule.delivered[:at] if other > index]
        assert len(overtakers) <= window - 1  # WO-3
        assert at <= schedule.position[index] + window - 1
    still_queued = {i for i in schedule.position if schedule.ledger.state(i) is State.QUEUED} - place.keys()
    for index in still_queued:
        assert sum(other > index for other in schedule.delivered) <= window - 1


@settings(max_examples=150, deadline=None)
@given(schedules(max_staleness=0))
def test_at_zero_staleness_nothing_is_admitted_before_the_version_it_needs(schedule):
    schedule.run()
    assert schedule.min_version == schedule.version_at_admission
    for index, version in schedule.trained_at.items():
        assert version == schedule.min_version[index]


@settings(max_examples=150, deadline=None)
@given(schedules(order="completion"))
def test_in_completion_order_a_finished_group_waits_for_at_most_max_staleness_other_steps(schedule):
    schedule.run()
    for index, version in schedule.trained_at.items():
        assert version <= schedule.version_at_finish[index] + schedule.config.max_staleness  # WO-5 and BL-1
    if schedule.config.max_staleness == 0:
        assert all(version == schedule.min_version[index] for index, version in schedule.trained_at.items())


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_admission_never_asks_for_weights_that_do_not_exist_yet(schedule):
    schedule.run()
    assert all(schedule.min_version[i] <= schedule.version_at_admission[i] for i in schedule.position)  # AD-3


def test_the_bound_is_reached_so_it_is_not_a_loose_one():
    config = BacklogSettings(groups_per_step=1, max_staleness=2, window=3)
    slow_third = [1.0, 1.0, 40.0, *[1.0] * 20]
    schedule = Schedule(
        config=config, durations=slow_third, retries=[0], fates=[State.QUEUED], steps=6, train_seconds=1.0
    ).run()
    assert schedule.delivered == [0, 1, 3, 4, 2, 5]
    assert schedule.trained_at[2] - schedule.min_version[2] == 4 == config.max_age


@pytest.mark.parametrize(
    ("position", "version", "is_open", "min_version"),
    [(0, 0, True, 0), (5, 0, True, 0), (6, 0, False, 1), (6, 1, True, 1), (8, 1, False, 2), (19, 9, True, 7)],
)
def test_admission_by_hand_for_two_groups_a_step_and_staleness_two(position, version, is_open, min_version):
    admission = Admission(groups_per_step=2, max_staleness=2)
    assert admission.is_open(position, version) is is_open
    assert admission.min_version(position) == min_version


def test_a_run_of_known_length_admits_no_more_than_it_trains():
    admission = Admission(groups_per_step=2, max_staleness=8, steps=3)
    assert [admission.is_open(position, 0) for position in (5, 6)] == [True, False]


def test_settings_that_cannot_work_are_listed_with_their_keys():
    broken = BacklogSettings(groups_per_step=0, max_staleness=-1)
    assert broken.problems("backlog.") == [
        "backlog.groups_per_step=0: must be at least 1",
        "backlog.max_staleness=-1: must be at least 0",
    ]
    assert BacklogSettings().problems("backlog.") == []
    broken = BacklogSettings(
        group_size=1, length_correction="inverse_propensity", max_length_weight=0.5, dynamic_sampling=True,
        max_no_signal_share=1.0,
    )  # fmt: skip
    assert broken.problems("backlog.") == [
        "backlog.length_correction=inverse_propensity: must be none where backlog.order is windowed, which leaves "
        "nothing to correct",
        "backlog.max_length_weight=0.5: must be a number of at least 1",
        "backlog.max_no_signal_share=1.0: must be above 0 and below 1",
        "backlog.group_size=1: must be at least 2 where backlog.dynamic_sampling is on, or no group has a signal",
    ]


def test_completion_order_has_no_age_bound_unless_it_is_synchronous():
    assert BacklogSettings(order="completion").max_age is None
    assert BacklogSettings(order="completion", max_staleness=0).max_age == 0

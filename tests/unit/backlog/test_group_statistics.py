"""What finished groups were like: passes by source, and when dynamic sampling has become hopeless."""

import pytest
from test_backlog_waits import group

from goaly.backlog.group_statistics import RECENT_STEPS, GroupStatistics
from goaly.backlog.settings import BacklogSettings
from goaly.prompts.curriculum import Passes

SIGNAL, NO_SIGNAL = (0.0, 1.0), (1.0, 1.0)


def statistics_of(*rewards: tuple[float, ...], limit: float = 0.5) -> GroupStatistics:
    statistics = GroupStatistics(BacklogSettings(groups_per_step=1, group_size=2, max_no_signal_share=limit))
    for ticket, of_group in enumerate(rewards):
        assert statistics.count(group(ticket, rewards=of_group)) is (of_group == SIGNAL)
    return statistics


HALF = RECENT_STEPS // 2


def test_it_is_hopeless_above_the_limit_and_not_at_it():
    at_the_limit = [SIGNAL] * HALF + [NO_SIGNAL] * HALF
    assert statistics_of(*at_the_limit).signal_error() is None
    above = statistics_of(*at_the_limit, NO_SIGNAL)
    assert above.no_signal_share == (HALF + 1) / RECENT_STEPS
    assert "9 of the last 16 groups had no signal" in str(above.signal_error())


def test_it_is_never_hopeless_before_enough_groups_have_finished():
    assert statistics_of(*[NO_SIGNAL] * (RECENT_STEPS - 1)).signal_error() is None
    assert statistics_of(*[NO_SIGNAL] * RECENT_STEPS).signal_error() is not None


def test_the_share_is_that_of_the_groups_so_far():
    assert statistics_of().no_signal_share == 0.0
    assert statistics_of(NO_SIGNAL).no_signal_share == 1.0


def test_only_the_recent_groups_count():
    long_ago = [NO_SIGNAL] * RECENT_STEPS
    statistics = statistics_of(*long_ago, *[SIGNAL] * RECENT_STEPS)
    assert statistics.no_signal_share == 0.0
    assert statistics.signal_error() is None


@pytest.mark.parametrize(("reward", "passed"), [(0.999, 0), (1.0, 1), (1.5, 1)])
def test_a_reward_of_one_passes_and_passes_are_taken_once(reward: float, passed: int):
    statistics = statistics_of((0.0, 1.0))
    statistics.count(group(1, rewards=(0.0, reward)))
    assert statistics.take_passes() == {"test": Passes(samples=4, passed=1 + passed)}
    assert statistics.take_passes() == {}

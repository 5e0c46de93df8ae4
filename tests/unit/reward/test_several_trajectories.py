"""An episode may make several trajectories: they have its place in the group, and each is trained by its own reward."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.backlog.batch import batch_metrics, check_group
from goaly.backlog.group_statistics import GroupStatistics
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import SchemaError
from goaly.reward.estimate import estimate
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group
from tests.unit.trajectories import sampled

COMPARE_GROUPS = ["group", "group_mean", "rloo", "process"]


def group_of(*episodes: Sequence[float], length: int = 3) -> Group:
    """A group of episodes, each with the rewards of its trajectories."""
    samples = [
        sampled(length, index=index, reward=reward) for index, rewards in enumerate(episodes) for reward in rewards
    ]
    return Group(ticket=0, prompt_id="p", source="test", samples=tuple(samples))


def advantages(name: str, *groups: Group) -> list[float]:
    """Each trajectory's advantage."""
    found = estimate(groups, AdvantageSettings(name=name)).advantages
    return [float(advantage_T[-1]) for advantage_T in found]


def test_each_episode_counts_once_in_its_group() -> None:
    batch = group_of([1.0, 1.0, 1.0], [0.0], [0.0, 0.0])
    assert advantages("group_mean", batch) == pytest.approx([2 / 3] * 3 + [-1 / 3] * 3)
    assert advantages("rloo", batch) == pytest.approx([1.0] * 3 + [-0.5] * 3)
    assert advantages("group", batch) == pytest.approx([2**0.5] * 3 + [-(0.5**0.5)] * 3, rel=1e-5)


def test_a_trajectory_with_a_reward_of_its_own_has_an_advantage_of_its_own() -> None:
    assert advantages("group_mean", group_of([1.0, 3.0], [0.0])) == pytest.approx([0.0, 2.0, -1.0])


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=3), min_size=2, max_size=5))
def test_rloo_leaves_out_all_trajectories_of_the_own_episode(episodes: list[list[float]]) -> None:
    means = [sum(rewards) / len(rewards) for rewards in episodes]
    others = [(sum(means) - mean) / (len(means) - 1) for mean in means]
    by_hand = [reward - other for rewards, other in zip(episodes, others, strict=True) for reward in rewards]
    assert advantages("rloo", group_of(*episodes)) == pytest.approx(by_hand, rel=1e-5, abs=1e-5)


def test_rloo_gives_nothing_to_an_episode_alone_in_its_group() -> None:
    assert advantages("rloo", group_of([1.0, 3.0]), group_of([2.0])) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", COMPARE_GROUPS)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=3), min_size=2, max_size=4))
def test_a_group_has_a_signal_where_an_estimator_finds_one(name: str, episodes: list[list[float]]) -> None:
    batch = group_of(*episodes)
    assert batch.has_signal == any(advantages(name, batch))
    assert GroupStatistics(BacklogSettings()).count(batch) == batch.has_signal
    assert batch_metrics(0, [batch])["groups/without_signal"] == float(not batch.has_signal)


@pytest.mark.parametrize("name", COMPARE_GROUPS)
@given(
    rewards=st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=5),
    copies=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_more_trajectories_of_an_episode_change_no_advantage(
    name: str, rewards: list[float], copies: list[int]
) -> None:
    other = group_of([0.5], [1.5, 1.5])
    single = advantages(name, other, group_of(*([reward] for reward in rewards)))
    counts = copies[: len(rewards)]
    repeated = [[reward] * count for reward, count in zip(rewards, counts, strict=True)]
    several = advantages(name, other, group_of(*repeated))
    expected = [value for value, count in zip(single[3:], counts, strict=True) for _ in range(count)]
    assert several == pytest.approx(single[:3] + expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", [*COMPARE_GROUPS, "reinforce_pp_baseline"])
def test_equal_episodes_of_different_sizes_have_no_signal(name: str) -> None:
    assert advantages(name, group_of([0.1], [0.1] * 3, [0.1] * 7)) == [0.0] * 11


def test_metrics_and_rewards_are_those_of_episodes() -> None:
    several = group_of([1.0, 0.0], [0.0], length=5)
    assert several.rewards == [0.5, 0.0]
    assert several.trained_tokens == [8, 4]
    metrics = batch_metrics(0, [several])
    assert metrics["reward/mean"] == 0.25
    assert metrics["reward/pass_rate"] == 0.0
    assert (metrics["length/mean"], metrics["length/max"]) == (6.0, 8.0)
    assert Group.decoded(bytearray(several.encoded())).rewards == several.rewards


def test_a_group_has_the_episodes_that_were_asked_for_each_in_one_piece() -> None:
    settings = BacklogSettings(group_size=2, row_length=16)
    check_group(group_of([1.0, 1.0], [0.0]), settings, 0)
    with pytest.raises(SchemaError, match=r"a group of 1 samples, must be backlog\.group_size=2"):
        check_group(group_of([1.0, 0.0]), settings, 0)
    first, second, other = group_of([1.0, 1.0], [0.0]).samples
    torn = Group(ticket=0, prompt_id="p", source="test", samples=(first, other, second))
    with pytest.raises(SchemaError, match="prompt p: the trajectories of an episode do not follow each other"):
        check_group(torn, settings, 0)
    assert torch.equal(first.tokens["rewards"], second.tokens["rewards"])

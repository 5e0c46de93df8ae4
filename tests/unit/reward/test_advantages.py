"""Advantages, by hand."""

import pytest
import torch

from goaly.reward.advantages import advantages, spread
from goaly.reward.settings import AdvantageSettings, RewardSettings


def test_the_group_estimator_counts_in_standard_deviations():
    assert advantages([0.0, 0.0, 0.0, 1.0], AdvantageSettings(name="group", epsilon=0.0)) == pytest.approx(
        [-0.57735, -0.57735, -0.57735, 1.73205], abs=1e-5
    )


def test_the_mean_estimator_keeps_the_scale():
    assert advantages([0.0, 2.0, 4.0], AdvantageSettings(name="group_mean")) == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("name", ["group", "group_mean"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [1.0]])
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(name, rewards):
    assert advantages(rewards, AdvantageSettings(name=name)) == [0.0] * len(rewards)  # AV-1


def test_only_trained_tokens_carry_the_advantage():
    assert spread(torch.tensor([False, True, False, True]), -1.5).tolist() == [0.0, -1.5, 0.0, -1.5]
    assert spread(torch.tensor([True]), 1.0).dtype == torch.float32


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    settings = AdvantageSettings(name="gae", epsilon=-1.0)
    with pytest.raises(ValueError, match="advantages name=gae: must be one of group, group_mean"):
        advantages([0.0, 1.0], settings)
    assert settings.problems("advantages.") == [
        "advantages.name=gae: must be one of group, group_mean",
        "advantages.epsilon=-1.0: must be at least 0",
    ]


def test_reward_settings_that_cannot_work_are_listed_with_their_keys():
    broken = RewardSettings(verifier="no function", workers=0, time_limit_seconds=0.0)
    assert broken.problems("reward.") == [
        "reward.verifier=no function: must be package.module:function",
        "reward.workers=0: must be at least 1",
        "reward.time_limit_seconds=0.0: must be a time above 0",
    ]
    assert RewardSettings().problems("reward.") == []

"""What a group's rewards say about each of its samples. Pure functions, found by name.

An estimator takes the rewards of all samples of one prompt and gives each sample's advantage; `spread` lays it on the
sample's trained tokens. To add one, write the function and register it; `settings.ADVANTAGE_NAMES` lists the names.

Invariants
    AV-1  A group whose samples all got the same reward has advantages of exactly 0: rounding makes no signal.
    AV-2  Only trained tokens carry an advantage.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from goaly.reward.settings import ADVANTAGE_NAMES, AdvantageSettings

Estimator = Callable[[Tensor, AdvantageSettings], Tensor]
"""Rewards f64 `[S]` of one group's samples -> advantages f64 `[S]`."""


def group(rewards_S: Tensor, settings: AdvantageSettings) -> Tensor:
    """Distance from the group's mean in standard deviations (population)."""
    return group_mean(rewards_S, settings) / (rewards_S.std(correction=0) + settings.epsilon)


def group_mean(rewards_S: Tensor, settings: AdvantageSettings) -> Tensor:
    """Distance from the group's mean; hard and easy prompts keep their own scale."""
    return rewards_S - rewards_S.mean()


ESTIMATORS: dict[str, Estimator] = {"group": group, "group_mean": group_mean}
assert set(ESTIMATORS) == set(ADVANTAGE_NAMES)


def advantages(rewards: list[float], settings: AdvantageSettings) -> list[float]:
    """Each sample's advantage within its group."""
    if settings.name not in ESTIMATORS:
        raise ValueError(f"advantages name={settings.name}: must be one of {', '.join(ESTIMATORS)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)  # AV-1
    return ESTIMATORS[settings.name](torch.tensor(rewards, dtype=torch.float64), settings).tolist()


def has_signal(rewards: list[float]) -> bool:
    """Whether the samples differ in reward at all."""
    return max(rewards) > min(rewards)


def spread(trained_T: Tensor, advantage: float) -> Tensor:
    """The advantage on each trained token, 0 elsewhere: f32 `[T]` (AV-2)."""
    return torch.where(trained_T, torch.tensor(advantage, dtype=torch.float32), torch.tensor(0.0))

"""The rewards of episodes that a limit cut off before their script gave one, as `rollout.cut_off_reward` says, and of
those whose verifier gave no score (`reward.on_error`, `reward.on_time_limit`). Pure.

Invariants
    CT-1  No unscored episode, and with `worst` no cut-off one, has a higher reward than a finished one of its group, or
          one above 0. Where none has finished, they keep what they have.
    CT-2  An episode that leaves its group counts nowhere: in no baseline, loss, count or denominator.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from goaly.generate.policy import ContextFull
from goaly.rollout.settings import CutOffReward
from goaly.trajectory import Trajectory, episode_reward

Episodes = Sequence[tuple[Trajectory, ...]]
"""The trajectories of each episode of a group."""


class NoneFinished(ContextFull):
    """All episodes of a group were cut off, and leave it."""

    reason = "cut_off"


def settled(
    finished: Episodes, cut_off: Episodes, setting: CutOffReward, unscored: Episodes = ()
) -> list[tuple[Trajectory, ...]]:
    """The episodes of a group in the order of their samples, with the rewards that count, but for those that leave it.

    A lowered reward sits on the last trained token, and takes the place of process rewards."""
    worst = min([0.0, *map(episode_reward, finished)]) if finished else math.inf
    made = [*finished, *_lowered(unscored, worst)]
    if setting != "exclude":
        made += _lowered(cut_off, worst if setting == "worst" else setting)  # CT-1
    return sorted(made, key=lambda episode: episode[0].sample_index)


def _lowered(episodes: Episodes, most: float) -> list[tuple[Trajectory, ...]]:
    return [tuple(lowered(one, most) for one in episode) for episode in episodes]


def lowered(trajectory: Trajectory, most: float) -> Trajectory:
    """The trajectory, with this reward if its own is higher."""
    if trajectory.reward <= most:
        return trajectory
    rewards_T, trained = torch.zeros(len(trajectory)), trajectory.tokens["trained"].nonzero()
    rewards_T[int(trained[-1]) if len(trained) else -1] = most
    return replace(trajectory, tokens=trajectory.tokens.clone(recurse=False).update({"rewards": rewards_T}))

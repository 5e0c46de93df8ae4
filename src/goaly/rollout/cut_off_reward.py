"""The rewards of episodes that a limit cut off before their script gave one (`rollout.cut_off_reward`), and of those
whose verifier gave no score (`reward.on_error`, `reward.on_time_limit`). Pure.

    rollout-8: No unscored episode, and with `worst` no cut-off one, has a higher reward than a finished one of its
        group, or one above 0. Where none has finished, they keep what they have.
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
    """The episodes that stay in a group, in the order of their samples, with the rewards that count."""
    worst = min([0.0, *map(episode_reward, finished)]) if finished else math.inf
    limited = [(episode, worst) for episode in unscored]
    if setting != "exclude":
        limited += [(episode, worst if setting == "worst" else setting) for episode in cut_off]
    made = [tuple(lowered(one, most) for one in episode) for episode, most in limited]  # rollout-8
    return sorted([*finished, *made], key=lambda episode: episode[0].sample_index)


def lowered(trajectory: Trajectory, most: float) -> Trajectory:
    """The trajectory, with this reward if its own is higher: on the last trained token, without process rewards."""
    if trajectory.reward <= most:
        return trajectory
    rewards_T, trained = torch.zeros(len(trajectory)), trajectory.tokens["trained"].nonzero()
    rewards_T[int(trained[-1]) if len(trained) else -1] = most
    return replace(trajectory, tokens=trajectory.tokens.clone(recurse=False).update({"rewards": rewards_T}))

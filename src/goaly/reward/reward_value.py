"""A reward as a script gives it, as the number that is trained on."""

import math
from typing import Any

import torch

from goaly.base.errors import EpisodeError


def reward_value(reward: Any, prompt_id: str) -> float:
    """The reward as a finite float; a tensor of one element counts as a number. EpisodeError for any other value."""
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not abs(value) <= torch.finfo(torch.float32).max:  # also when it is not a number
        kind = type(reward).__name__
        raise EpisodeError(f"prompt {prompt_id}: the reward is {reward!r} ({kind}), must be a finite float32 number")
    return value

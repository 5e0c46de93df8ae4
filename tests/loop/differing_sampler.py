"""A loss whose import lets all log-probs of a batch be other ones than the sampler's, and breaks an operation of the
sampler in which the trainer searches for the reason.

A run imports it in the trainer's processes, as the module of a user's own loss.
"""

import sys
from typing import Any

import torch

from goaly.generate import sampler_search
from goaly.losses.tokens import Tokens
from goaly.train.engine import TrainEngine
from goaly.trajectory import PackedRows

OPERATION = "layers.1.attention.wo"
plain_step = TrainEngine.train_step


def step_with_other_logprobs(self: TrainEngine, packed: PackedRows, *rest: Any) -> dict[str, float]:
    """A step whose rows have the sampler's log-probs but for the last bit."""
    logprobs_RL = packed.rows["sampler_logprobs"]
    packed.rows["sampler_logprobs"] = torch.nextafter(logprobs_RL, torch.zeros_like(logprobs_RL))
    return plain_step(self, packed, *rest)


def gradient(tokens: Tokens) -> torch.Tensor:
    """The policy gradient."""
    return -tokens.ratio_P * tokens.advantages_P


TrainEngine.train_step = step_with_other_logprobs
sampler_search.PROGRAM = (sys.executable, "-m", "tests.actors.broken_sampler", "sampler", OPERATION)

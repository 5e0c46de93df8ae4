"""A loss whose import breaks an operation on the last rank of the trainer.

A run imports it in the trainer's processes, as the module of a user's own loss.
"""

from typing import Any

import torch
import torch.distributed as dist

from goaly.losses.tokens import Tokens
from goaly.train.train_engine import TrainEngine

OPERATION = "layers.1.attention.wo"
plain_step = TrainEngine.train_step


def broken_step(self: TrainEngine, *given: Any) -> dict[str, float]:
    """A step of a model of which one rank computes an operation wrongly."""
    if dist.get_rank() == dist.get_world_size() - 1:
        self._model.get_submodule(OPERATION).register_forward_hook(lambda module, inputs, output: output * 1.02)
    return plain_step(self, *given)


def gradient(tokens: Tokens) -> torch.Tensor:
    """The policy gradient."""
    return -tokens.ratio_P * tokens.advantages_P


TrainEngine.train_step = broken_step

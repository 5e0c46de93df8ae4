"""An exponential moving average of a model's tensors: the weights of a reference that follows the policy slowly.

The average is float32, and the live tensors are copies of it in their own type. A checkpoint has the copies, so an
average of bfloat16 tensors begins from rounded ones after a restart.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from goaly.weights.dtensor_layout import local


class Average:
    """The average of this rank's part of the tensors, from what they are when it is made."""

    def __init__(self, tensors: Mapping[str, Tensor], keeps: float):
        """`keeps` is the share of the average that stays when other weights are taken into it."""
        self._live = [local(one) for one in tensors.values()]
        self._average = [one.detach().to(torch.float32, copy=True) for one in self._live]
        self._keeps = keeps

    @torch.no_grad()
    def take(self) -> None:
        """Take the live tensors into the average, and put it in their place."""
        torch._foreach_lerp_(self._average, [one.float() for one in self._live], 1 - self._keeps)
        torch._foreach_copy_(self._live, self._average)

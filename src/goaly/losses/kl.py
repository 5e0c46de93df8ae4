"""Estimates of KL(p || q) from tokens that p drew: one value a token. Pure.

With `difference = log q - log p` at the drawn token:

    k1 = -difference                   unbiased; may be negative
    k2 = difference^2 / 2              biased, small variance; its gradient is that of the divergence when p trains
    k3 = e^difference - 1 - difference unbiased and never negative
"""

from collections.abc import Callable
from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def k1(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """log p - log q. Trained through p its expected gradient is 0: it penalizes in the reward, not in the loss."""
    return drawn_P - other_P


def k2(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """Half the squared difference."""
    return (other_P - drawn_P).square() / 2


def k3(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """Unbiased like k1, and never negative."""
    difference_P = other_P - drawn_P
    return difference_P.exp() - 1 - difference_P


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(estimator: Estimator, drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """The estimate of KL(p || q) at each token that p drew with `drawn_P` and q would have with `other_P`."""
    return ESTIMATORS[estimator](drawn_P, other_P)

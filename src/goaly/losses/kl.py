"""Divergences of two policies p and q at tokens that p drew: one value a token. Pure.

Estimates of KL(p || q), with `difference = log q - log p` at the drawn token:

    k1 = -difference                   unbiased; may be negative
    k2 = difference^2 / 2              biased, small variance; its gradient is that of the divergence when p trains
    k3 = e^difference - 1 - difference unbiased and never negative; linear where the difference exceeds K3_BOUND

Divergences of two outcomes (this token or any other) need only the token's two probabilities.
"""

from collections.abc import Callable
from math import expm1
from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]
BinaryDivergence = Literal["total_variation", "kl"]

K3_BOUND = 5.0
"""Above this difference k3 continues along its tangent, so its gradient by log p is at most e^5 - 1, about 147."""


def k1(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """log p - log q. Its expected gradient through p is 0, so use it in the reward, not in the loss."""
    return drawn_P - other_P


def k2(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """Half the squared difference."""
    return (other_P - drawn_P).square() / 2


def k3(drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """Unbiased like k1, and never negative. Linear beyond K3_BOUND, so that one very stale token can't dominate a
    batch."""
    difference_P = other_P - drawn_P
    bounded_P = difference_P.clamp(max=K3_BOUND)
    return bounded_P.expm1() - bounded_P + expm1(K3_BOUND) * (difference_P - K3_BOUND).relu()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(estimator: KlEstimator, drawn_P: torch.Tensor, other_P: torch.Tensor) -> torch.Tensor:
    """The estimate of KL(p || q) at each token; p drew it with log-prob `drawn_P`, and q gives it `other_P`."""
    return KL_ESTIMATORS[estimator](drawn_P, other_P)


def binary_divergence(kind: BinaryDivergence, p_P: torch.Tensor, q_P: torch.Tensor) -> torch.Tensor:
    """Total variation or KL(p || q) of the two outcomes, given the log-probs of this token under p and q."""
    old_P, new_P = p_P.exp(), q_P.exp()
    if kind == "total_variation":
        return (new_P - old_P).abs()
    rest_old_P, rest_new_P = -torch.expm1(p_P), -torch.expm1(q_P)
    others_P = torch.xlogy(rest_old_P, rest_old_P) - torch.xlogy(rest_old_P, rest_new_P)
    return old_P * (p_P - q_P) + others_P

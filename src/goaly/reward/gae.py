"""Generalized advantage estimation: what a critic's values say about each token of one trajectory. Pure.

A counts the tokens that the policy wrote, in order; what others wrote in between is no action and has no value.
"""

import torch


def gae(
    rewards_A: torch.Tensor,
    values_A: torch.Tensor,
    *,
    discount: float = 1.0,
    smoothing: float = 0.95,
    last_value: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(advantages_A, returns_A)` in the values' dtype; `last_value` is the critic's for what follows, 0 at an end.

    With `delta_t = r_t + discount * V_{t+1} - V_t`, `A_t = delta_t + discount * smoothing * A_{t+1}`, and the return
    that the critic learns is `A_t + V_t` (Schulman et al., arXiv:1506.02438).
    """
    following_A = torch.cat([values_A[1:], values_A.new_tensor([last_value])])[: len(values_A)]
    deltas = (rewards_A + discount * following_A - values_A).double().tolist()
    advantages, later = [], 0.0
    for delta in reversed(deltas):
        later = delta + discount * smoothing * later
        advantages.append(later)
    advantages_A = torch.tensor(advantages[::-1], dtype=torch.float64).to(values_A)
    return advantages_A, advantages_A + values_A

"""Generalized advantage estimation: what a critic's values say about each token of one trajectory. Pure.

A counts the trained tokens, in order: they alone are steps, and what others wrote in between is no action and has no
value. The value of a token is that of the state before it is written: what the critic expects once it has seen all
that stands before the token.
"""

import torch


def gae(
    rewards_A: torch.Tensor, values_A: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(advantages_A, returns_A)` in the values' dtype; nothing follows the last step.

    With `delta_t = r_t + gamma * V_{t+1} - V_t`, `A_t = delta_t + gamma * lam * A_{t+1}`, and the return, which the
    critic learns, is `A_t + V_t` (Schulman et al., arXiv:1506.02438).
    """
    following_A = torch.cat([values_A[1:], values_A.new_zeros(1)])[: len(values_A)]
    advantages_A = to_go(rewards_A + gamma * following_A - values_A, gamma * lam)
    return advantages_A, advantages_A + values_A


def to_go(values: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """Of each step its own and all later values, each discounted by the steps in between; summed in float64."""
    if discount == 1:
        return values.double().flip(0).cumsum(0).flip(0).to(values)
    sums, later = [], 0.0
    for value in reversed(values.double().tolist()):
        later = value + discount * later
        sums.append(later)
    return torch.tensor(sums[::-1], dtype=torch.float64).to(values)


def rewards_of_steps(rewards_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """The reward of each step `[A]`: a trained token's own, and what is credited to others before the next step.

    What is credited before the first step was earned by none.
    """
    step_T = trained_T.cumsum(0) - 1
    after = step_T >= 0
    steps_A = rewards_T.new_zeros(int(trained_T.sum()))
    return steps_A.index_add(0, step_T[after], rewards_T[after])

"""Distillation: a value for each token from a teacher's log-probs, to be minimized. Pure.

The teacher's log-probs are those of the tokens that the policy wrote, or of the teacher's K most likely tokens at each
place. The K tokens and one bin for all others, the tail, are two distributions over K + 1 bins:

    advantage    log teacher - log policy of the token that was written, without a gradient: an advantage
    reverse_kl   sum over bins of  policy * (log policy - log teacher)
    forward_kl   sum over bins of  teacher * (log teacher - log policy)

Both divergences are at most those of the whole vocabulary, and equal them where the tails have the same shape. A tail's
probability counts as at least TAIL, so that a divergence is finite.

Shape suffixes: P trained tokens, K most likely tokens of the teacher, B bins.
"""

import torch
from torch import Tensor

TAIL = 1e-6
"""The least probability of the tail: float32 knows the rest of 1 to about 1e-7."""


def advantages(teacher_P: Tensor, policy_P: Tensor) -> Tensor:
    """How much likelier the teacher finds each token than the policy, in nats."""
    return (teacher_P - policy_P).detach()


def with_tail(logprobs_PK: Tensor) -> Tensor:
    """Log-probs of K different tokens, with that of all others as the last bin."""
    rest_P = 1 - logprobs_PK.exp().sum(-1)
    return torch.cat([logprobs_PK, rest_P.clamp(min=TAIL).log()[..., None]], -1)


def reverse_kl(teacher_PK: Tensor, policy_PK: Tensor) -> Tensor:
    """KL(policy || teacher) over the bins: the policy leaves what the teacher finds unlikely."""
    teacher_PB, policy_PB = with_tail(teacher_PK), with_tail(policy_PK)
    return (policy_PB.exp() * (policy_PB - teacher_PB)).sum(-1)


def forward_kl(teacher_PK: Tensor, policy_PK: Tensor) -> Tensor:
    """KL(teacher || policy) over the bins: the policy covers all that the teacher finds likely."""
    teacher_PB, policy_PB = with_tail(teacher_PK), with_tail(policy_PK)
    return (teacher_PB.exp() * (teacher_PB - policy_PB)).sum(-1)


DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl}
"""Divergences of the policy from a teacher, from log-probs `[P, K]` of the teacher's K most likely tokens."""

"""What makes up for tokens that another policy drew: importance weights, and what is rejected. Pure.

All of it looks at probabilities without gradient. A rejected token adds nothing to the loss; whether it still counts in
the denominator is a setting of the objective.
"""

import torch

from goaly.losses.kl import binary_divergence, divergence
from goaly.losses.segments import sequence_mean, sequence_sum
from goaly.losses.settings import Importance, Rejection


def importance_weights(
    proximal_P: torch.Tensor,
    sampler_P: torch.Tensor,
    documents_P: torch.Tensor,
    level: Importance,
    cap: float | None,
    floor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """proximal / sampler of each token or of its whole sequence, between `floor` and `cap`; and where it was cut.

    Of a sequence it is the tokens' product (`sequence`) or their geometric mean (`geometric`).
    """
    log_weight_P = proximal_P - sampler_P
    if level != "token":
        log_weight_P = (sequence_sum if level == "sequence" else sequence_mean)(log_weight_P, documents_P)
    weight_P = log_weight_P.exp()
    bounded_P = weight_P if cap is None else weight_P.clamp(max=cap)
    bounded_P = bounded_P if floor is None else bounded_P.clamp(min=floor)
    return bounded_P, bounded_P != weight_P


def rejected(
    rule: Rejection, policy_P: torch.Tensor, sampler_P: torch.Tensor, documents_P: torch.Tensor
) -> torch.Tensor:
    """Which tokens a rule rejects, given the log-probs of the policy that it compares with the sampler."""
    measured_P = _measured(rule, policy_P, sampler_P)
    if rule.level == "sequence":
        measured_P = sequence_mean(measured_P, documents_P)
    if rule.level == "sequence_sum":
        measured_P = sequence_sum(measured_P, documents_P)
    if rule.measure == "ratio":
        measured_P = measured_P.exp()  # over a sequence: the geometric mean, or the product
    outside_P = torch.zeros_like(documents_P, dtype=torch.bool)
    if rule.low is not None:
        outside_P |= measured_P < rule.low
    if rule.high is not None:
        outside_P |= measured_P > rule.high
    if rule.level == "veto":
        return sequence_sum(outside_P.float(), documents_P) > 0
    return outside_P


def _measured(rule: Rejection, policy_P: torch.Tensor, sampler_P: torch.Tensor) -> torch.Tensor:
    """What the rule measures at each token; a ratio is still its logarithm."""
    if rule.measure in ("ratio", "log_ratio"):
        return policy_P - sampler_P
    if rule.measure == "binary_kl":
        there_P, back_P = binary_divergence("kl", sampler_P, policy_P), binary_divergence("kl", policy_P, sampler_P)
        return torch.maximum(there_P, back_P)
    return divergence(rule.measure, sampler_P, policy_P)


def too_old(ages_P: torch.Tensor, max_age: int) -> torch.Tensor:
    """Which tokens were drawn by weights more than `max_age` versions old: the early part of a long rollout, say."""
    return ages_P > max_age

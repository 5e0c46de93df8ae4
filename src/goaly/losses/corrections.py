"""What makes up for tokens that another policy drew: importance weights, and what is rejected. Pure.

All of it looks at probabilities without gradient. A rejected token adds nothing to the loss; whether it still counts in
the denominator is a setting of the objective.
"""

import torch

from goaly.losses.kl import divergence
from goaly.losses.segments import sequence_mean, sequence_sum
from goaly.losses.settings import Level, Rejection


def importance_weights(
    proximal_P: torch.Tensor, sampler_P: torch.Tensor, documents_P: torch.Tensor, level: Level, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """proximal / sampler of each token or of its whole sequence (the product), at most `cap`; and where it was cut."""
    log_weight_P = proximal_P - sampler_P
    weight_P = (sequence_sum(log_weight_P, documents_P) if level == "sequence" else log_weight_P).exp()
    if cap is None:
        return weight_P, torch.zeros_like(weight_P, dtype=torch.bool)
    return weight_P.clamp(max=cap), weight_P > cap


def rejected(
    rule: Rejection, current_P: torch.Tensor, sampler_P: torch.Tensor, documents_P: torch.Tensor
) -> torch.Tensor:
    """Which tokens a rule rejects."""
    log_ratio_P = current_P - sampler_P
    if rule.measure == "ratio":
        whole_P = sequence_mean(log_ratio_P, documents_P) if rule.level == "sequence" else log_ratio_P
        measured_P = whole_P.exp()  # over a sequence: the geometric mean
    else:
        measured_P = divergence(rule.measure, sampler_P, current_P)
        measured_P = sequence_mean(measured_P, documents_P) if rule.level == "sequence" else measured_P
    outside_P = torch.zeros_like(documents_P, dtype=torch.bool)
    if rule.low is not None:
        outside_P |= measured_P < rule.low
    if rule.high is not None:
        outside_P |= measured_P > rule.high
    if rule.level == "veto":
        return sequence_sum(outside_P.float(), documents_P) > 0
    return outside_P


def too_old(ages_P: torch.Tensor, max_age: int) -> torch.Tensor:
    """Which tokens were drawn by weights more than `max_age` versions old: the early part of a long rollout, say."""
    return ages_P > max_age

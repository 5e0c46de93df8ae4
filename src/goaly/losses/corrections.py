"""Off-policy corrections: the proximal policy, importance weights, and masks of rejected tokens. Pure.

The policy loss clips the ratio current / proximal. The other factor, proximal / sampler, is an importance weight. Their
product is current / sampler for every proximal policy:

    sampler       proximal = sampler. The weight is 1: PPO, GRPO.
    trainer       proximal = the trainer's weights before the batch. In the first optimizer step of a batch these are
                  the current weights, so their log-probs need no extra forward pass and the ratio is 1. For later
                  steps they are computed before the first step.
    interpolated  between the two on the logarithmic scale, by the token's age a (A-3PO, arXiv:2512.06547):
                  log proximal = log sampler + a / (a + 1) * (log current - log sampler)

A token that was drawn under a form counts in each product, sum and mean over its sequence by its form weight
(`form_P`).

No correction has a gradient. A rejected token adds nothing to the loss; `loss.denominator` decides whether it counts in
the denominator.
"""

import torch

from goaly.losses.kl import binary_divergence, divergence
from goaly.losses.settings import Importance, Proximal, Rejection, Sign
from goaly.losses.tokens import sequence_mean, sequence_sum


def proximal_logprobs(
    kind: Proximal,
    current_P: torch.Tensor,
    sampler_P: torch.Tensor,
    ages_P: torch.Tensor,
    before_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """The proximal policy's log-probs, without gradient. `before_P` are the trainer's log-probs before the batch; None
    if these are the current ones."""
    current_P = current_P.detach()
    if kind == "sampler":
        return sampler_P
    if kind == "trainer":
        return current_P if before_P is None else before_P
    ages_P = ages_P.to(current_P.dtype)
    return sampler_P + ages_P / (ages_P + 1) * (current_P - sampler_P)


def importance_weights(
    proximal_P: torch.Tensor,
    sampler_P: torch.Tensor,
    documents_P: torch.Tensor,
    level: Importance,
    cap: float | torch.Tensor | None,
    floor: float | torch.Tensor | None = None,
    form_P: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights proximal / sampler, clipped to `floor` and `cap`, and a mask of the clipped ones.

    By `level`: each token's own weight, the product over its sequence, or the geometric mean over it. The bounds are
    numbers, or a tensor with those of each token.
    """
    log_weight_P = proximal_P - sampler_P
    if level != "token":
        log_weight_P = (sequence_sum if level == "sequence" else sequence_mean)(log_weight_P, documents_P, form_P)
    weight_P = log_weight_P.exp()
    bounded_P = weight_P if cap is None else weight_P.clamp(max=cap)
    bounded_P = bounded_P if floor is None else bounded_P.clamp(min=floor)
    return bounded_P, bounded_P != weight_P


def bound_by_sign(
    bound: float | None, own: float | None, signed_P: torch.Tensor, *, otherwise: float
) -> float | torch.Tensor | None:
    """`bound` for all tokens, and where `signed_P` holds `own` in its place if that is set; `otherwise` is no bound."""
    if own is None:
        return bound
    general_P = torch.full(signed_P.shape, otherwise if bound is None else bound, device=signed_P.device)
    return torch.where(signed_P, own, general_P)


def rejected(
    rule: Rejection,
    policy_P: torch.Tensor,
    sampler_P: torch.Tensor,
    documents_P: torch.Tensor,
    form_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of tokens that a rule rejects; `policy_P` are the log-probs that it compares with the sampler's."""
    measured_P = _measured(rule, policy_P, sampler_P)
    if rule.level == "sequence":
        measured_P = sequence_mean(measured_P, documents_P, form_P)
    if rule.level == "sequence_sum":
        measured_P = sequence_sum(measured_P, documents_P, form_P)
    if rule.level == "veto" and form_P is not None:
        measured_P = form_P * measured_P
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
    """The rule's measure at each token; a ratio as its logarithm."""
    if rule.measure in ("ratio", "log_ratio"):
        return policy_P - sampler_P
    if rule.measure == "binary_kl":
        there_P, back_P = binary_divergence("kl", sampler_P, policy_P), binary_divergence("kl", policy_P, sampler_P)
        return torch.maximum(there_P, back_P)
    return divergence(rule.measure, sampler_P, policy_P)


def has_sign(advantages_P: torch.Tensor, sign: Sign) -> torch.Tensor:
    """The mask of tokens whose advantage has this sign."""
    if sign == "any":
        return torch.ones_like(advantages_P, dtype=torch.bool)
    return advantages_P < 0 if sign == "negative" else advantages_P > 0


def too_old(ages_P: torch.Tensor, max_age: int) -> torch.Tensor:
    """The mask of tokens from weights more than `max_age` versions old, such as the beginning of a long rollout."""
    return ages_P > max_age

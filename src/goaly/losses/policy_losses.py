"""The policy losses: one value a token, from the ratio current / proximal and the advantage. Pure.

`docs/algorithms.md` has the formula and the reference of each. Aggregation, importance weights, rejections and KL terms
are the same for all losses and are in `objective.py`. To add a loss, write a function of `Tokens` that returns `[P]`
values (or a `LossOutput` with metrics) and decorate it, or name it by its path in the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from goaly.base.config.settings import AtLeastOne, NonNegativeFloat, PositiveFloat, Share
from goaly.base.registry import Registry
from goaly.losses.kl import BinaryDivergence, binary_divergence
from goaly.losses.tokens import LossOutput, Tokens

PolicyLoss = Callable[..., torch.Tensor | LossOutput]
"""A function of `Tokens`; its keyword-only parameters are its options."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Ratio = Literal["token", "sequence"]

LOSSES: Registry[PolicyLoss] = Registry("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Properties of a loss."""

    aggregation: Aggregation = "token_mean"
    """Its default aggregation."""
    ratio: Ratio = "token"
    """Whether it uses a ratio for each token, or one for the whole sequence."""
    bounds_ratio: bool = False
    """Whether its options only bound the ratio, and so have no effect while the ratio is 1."""


_TRAITS: dict[str, LossTraits] = {}


def loss(
    name: str, *, aggregation: Aggregation = "token_mean", ratio: Ratio = "token"
) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a loss whose options only bound the ratio."""
    _TRAITS[name] = LossTraits(aggregation=aggregation, ratio=ratio, bounds_ratio=True)
    return LOSSES.register(name)


def traits(name: str) -> LossTraits:
    """The traits of a loss; the defaults for one that is named by its path."""
    return _TRAITS.get(name, LossTraits())


@loss("ppo")
def ppo(
    tokens: Tokens, *, clip_low: Share = 0.2, clip_high: NonNegativeFloat = 0.2, dual_clip: AtLeastOne | None = None
) -> LossOutput:
    """Clipped surrogate: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, where A < 0 at most `-dual_clip A`."""
    output = clipped(tokens.ratio_P, tokens.advantages_P, clip_low, clip_high)
    if dual_clip is None:
        return output
    ceiling_P = -dual_clip * tokens.advantages_P
    above_P = (tokens.advantages_P < 0) & (output.loss_P.detach() > ceiling_P)
    return LossOutput(
        loss_P=torch.where(above_P, ceiling_P, output.loss_P),
        mean={**output.mean, "clip_fraction_dual": above_P.float()},
    )


@loss("grpo")
def grpo(tokens: Tokens, *, clip_low: Share = 0.2, clip_high: NonNegativeFloat = 1.0) -> LossOutput:
    """PPO's surrogate with room above for data several versions old; the group's advantage makes it GRPO."""
    return clipped(tokens.ratio_P, tokens.advantages_P, clip_low, clip_high)


@loss("dr_grpo", aggregation="sequence_sum")
def dr_grpo(tokens: Tokens, *, clip_low: Share = 0.2, clip_high: NonNegativeFloat = 0.2) -> LossOutput:
    """PPO's surrogate over a constant length, for advantages without standard deviation (`group_mean`)."""
    return clipped(tokens.ratio_P, tokens.advantages_P, clip_low, clip_high)


@loss("dapo")
def dapo(tokens: Tokens, *, clip_low: Share = 0.2, clip_high: NonNegativeFloat = 0.28) -> LossOutput:
    """PPO's surrogate with more room above, as a mean over tokens."""
    return clipped(tokens.ratio_P, tokens.advantages_P, clip_low, clip_high)


@loss("cispo")
def cispo(tokens: Tokens, *, clip_low: Share = 1.0, clip_high: NonNegativeFloat = 4.0) -> LossOutput:
    """`-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p`: the weight is clipped, every token has a gradient."""
    ratio_P = tokens.ratio_P.detach()
    weight_P = ratio_P.clamp(1 - clip_low, 1 + clip_high)
    mean = {
        "clip_fraction_low": (ratio_P < 1 - clip_low).float(),
        "clip_fraction_high": (ratio_P > 1 + clip_high).float(),
    }
    return LossOutput(loss_P=-weight_P * tokens.advantages_P * tokens.logprobs_P, mean=mean)


@loss("gspo", aggregation="sequence_mean", ratio="sequence")
def gspo(tokens: Tokens, *, clip_low: Share = 3e-4, clip_high: NonNegativeFloat = 4e-4) -> LossOutput:
    """PPO's surrogate with one ratio a sequence: the geometric mean of its tokens' ratios."""
    ratio_P = tokens.sequence_mean(tokens.logprobs_P - tokens.proximal_logprobs_P).exp()
    return clipped(ratio_P, tokens.advantages_P, clip_low, clip_high)


@loss("gspo_token", aggregation="sequence_mean", ratio="sequence")
def gspo_token(tokens: Tokens, *, clip_low: Share = 3e-4, clip_high: NonNegativeFloat = 4e-4) -> LossOutput:
    """GSPO's ratio and clip, with the gradient of each token's own log-prob: for advantages that differ by token."""
    mean_P = tokens.sequence_mean(tokens.logprobs_P.detach() - tokens.proximal_logprobs_P)
    ratio_P = (mean_P + tokens.logprobs_P - tokens.logprobs_P.detach()).exp()
    return clipped(ratio_P, tokens.advantages_P, clip_low, clip_high)


@loss("sapo", aggregation="sequence_mean")
def sapo(tokens: Tokens, *, positive: PositiveFloat = 1.0, negative: PositiveFloat = 1.05) -> torch.Tensor:
    """`-4 / t sigmoid(t (r - 1)) A`: a soft gate instead of a clip; t is `positive` where A > 0, else `negative`."""
    temperature_P = torch.where(tokens.advantages_P > 0, positive, negative)
    gate_P = (temperature_P * (tokens.ratio_P - 1)).sigmoid() * 4 / temperature_P
    return -gate_P * tokens.advantages_P


@loss("reinforce")
def reinforce(tokens: Tokens) -> torch.Tensor:
    """`-r A`: the importance-weighted policy gradient, never clipped."""
    return -tokens.ratio_P * tokens.advantages_P


@loss("dppo")
def dppo(
    tokens: Tokens,
    *,
    divergence: BinaryDivergence = "total_variation",
    threshold: PositiveFloat = 0.15,
    threshold_high: PositiveFloat | None = None,
) -> LossOutput:
    """`-r A`, masked where the probability has moved further than the threshold in A's direction: up by more than
    `threshold_high` (null: `threshold`) where A > 0, down by more than `threshold` where A < 0.

    The divergence is that of two outcomes: this token or another.
    """
    ratio_P, advantages_P = tokens.ratio_P, tokens.advantages_P
    distance_P = binary_divergence(divergence, tokens.proximal_logprobs_P, tokens.logprobs_P.detach())
    high = threshold if threshold_high is None else threshold_high
    above_P = (advantages_P > 0) & (ratio_P > 1) & (distance_P > high)
    below_P = (advantages_P < 0) & (ratio_P < 1) & (distance_P > threshold)
    masked_P = above_P | below_P
    return LossOutput(
        loss_P=torch.where(masked_P, 0.0, -ratio_P * advantages_P),
        mean={
            "clip_fraction": masked_P.float(),
            "clip_fraction_low": below_P.float(),
            "clip_fraction_high": above_P.float(),
        },
    )


def clipped(ratio_P: torch.Tensor, advantages_P: torch.Tensor, clip_low: float, clip_high: float) -> LossOutput:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and how often each side of the clip is active."""
    clipped_P = ratio_P.clamp(1 - clip_low, 1 + clip_high)
    mean = {
        "clip_fraction_low": ((advantages_P < 0) & (ratio_P < 1 - clip_low)).float(),
        "clip_fraction_high": ((advantages_P > 0) & (ratio_P > 1 + clip_high)).float(),
    }
    return LossOutput(loss_P=-torch.minimum(ratio_P * advantages_P, clipped_P * advantages_P), mean=mean)

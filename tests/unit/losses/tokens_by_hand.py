"""Tokens for tests of losses, from the ratios and lengths that a test thinks in."""

from collections.abc import Sequence
from dataclasses import replace
from math import log

import torch

from goaly.losses.objective import Contribution, PolicyObjective
from goaly.losses.policy_losses import LOSSES
from goaly.losses.settings import LossSettings, Rejection
from goaly.losses.tokens import LossOutput, Tokens

SAMPLED = 0.2
"""Probability with which the sampler drew every token."""
ABOVE_3 = Rejection(measure="ratio", level="token", high=3.0, policy="current")
"""Rejects tokens whose ratio current / sampler is above 3."""


def documents(lengths: Sequence[int]) -> torch.Tensor:
    """Numbers of sequences of these lengths, token by token."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def tokens(ratios: Sequence[float], advantages: Sequence[float], *, lengths: Sequence[int] | None = None) -> Tokens:
    """Tokens whose current policy has these ratios to the sampler, which is the proximal policy too."""
    sampler_P = torch.full((len(ratios),), log(SAMPLED))
    return Tokens(
        logprobs_P=torch.tensor([log(SAMPLED * ratio) for ratio in ratios], requires_grad=True),
        entropies_P=torch.zeros(len(ratios)),
        proximal_logprobs_P=sampler_P,
        sampler_logprobs_P=sampler_P,
        advantages_P=torch.tensor(advantages),
        ages_P=torch.zeros(len(ratios), dtype=torch.int64),
        documents_P=documents(lengths or [len(ratios)]),
        kept_P=torch.ones(len(ratios), dtype=torch.bool),
        columns={},
    )


def evaluated(name: str, given: Tokens, **options: object) -> tuple[LossOutput, torch.Tensor]:
    """A loss's output, and the gradient of its sum by each token's log-prob."""
    output = LOSSES.bound(name, options)(given)
    if isinstance(output, torch.Tensor):
        output = LossOutput(loss_P=output)
    (gradient,) = torch.autograd.grad(output.loss_P.sum(), given.logprobs_P)
    return replace(output, loss_P=output.loss_P.detach()), gradient


def columns(
    lengths: Sequence[int], advantages: Sequence[float], *, versions: Sequence[int] | None = None, **more: list[float]
) -> dict[str, torch.Tensor]:
    """The columns of tokens that the sampler drew with probability SAMPLED, by weights of version 0 unless given."""
    count = sum(lengths)
    return {
        "sampler_logprobs": torch.full((count,), log(SAMPLED)),
        "sampler_versions": torch.tensor(versions or [0] * count, dtype=torch.int32),
        "advantages": torch.tensor(advantages),
        "documents": documents(lengths),
        **{key: torch.tensor(value) for key, value in more.items()},
    }


def objective(
    settings: LossSettings, ratios: Sequence[float], batch: dict[str, torch.Tensor], *, policy_version: int = 0
) -> tuple[Contribution, torch.Tensor]:
    """The settings' contribution of tokens with these ratios current / sampler, and its gradient by each log-prob."""
    logprobs_P = torch.tensor([log(SAMPLED * ratio) for ratio in ratios], requires_grad=True)
    part = PolicyObjective(settings)(logprobs_P, torch.zeros(len(ratios)), batch, policy_version)
    (gradient,) = torch.autograd.grad(part.total, logprobs_P)
    return part, gradient

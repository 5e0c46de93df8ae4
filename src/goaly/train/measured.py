"""What an optimizer step measured, and what the steps on one batch measured together. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from goaly.losses.objective import Contribution, finish

TOKENS, COUNT = "tokens", "count"
"""Sums beside the loss and the metrics: trained tokens, and what the objective counts of them."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Numbers of all ranks' trained tokens."""

    tokens: float
    means: dict[str, float]
    """The loss, and means over the tokens."""
    maxima: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """What is reported of them."""
        return finish(self.means | self.maxima)


def together(steps: Sequence[Measured]) -> Measured:
    """All of a batch's steps as one: means over all their tokens, each as its own step saw it."""
    tokens = sum(step.tokens for step in steps)
    shares = [step.tokens / max(tokens, 1) for step in steps]
    return Measured(
        tokens=tokens,
        means={
            name: sum(share * step.means[name] for share, step in zip(shares, steps, strict=True))
            for name in steps[0].means
        },
        maxima={name: max(step.maxima[name] for step in steps) for name in steps[0].maxima},
    )


def sums(part: Contribution, loss: torch.Tensor, tokens: int) -> dict[str, torch.Tensor]:
    """What this microbatch adds to the global batch's loss, counts and means."""
    found = {TOKENS: loss.new_tensor(tokens), "loss": loss.detach()}
    found |= {name: values_P.detach().sum() for name, values_P in part.mean.items()}
    return found if part.count is None else found | {COUNT: part.count}


def greatest(part: Contribution) -> dict[str, torch.Tensor]:
    """What this microbatch says of the global batch's maxima."""
    return {name: _greatest(values_P) for name, values_P in part.maximum.items()}


def measured(summed: Mapping[str, float], maxima: dict[str, float]) -> Measured:
    """The numbers whose sums and maxima over all microbatches and ranks these are."""
    tokens = summed[TOKENS]
    means = {
        name: value if name == "loss" else value / max(tokens, 1)
        for name, value in summed.items()
        if name not in (TOKENS, COUNT)
    }
    return Measured(tokens=tokens, means=means, maxima=maxima)


def _greatest(values_P: torch.Tensor) -> torch.Tensor:
    """The greatest value; where there is none, one that every value exceeds."""
    return values_P.detach().amax() if len(values_P) else values_P.new_tensor(-math.inf)

"""The metrics of an optimizer step, and of all steps on one batch. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from goaly.losses.objective import Contribution, finish

TOKENS, COUNT = "tokens", "count"
"""Keys of two further sums: trained tokens, and the objective's own count of them."""


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """Means and maxima over the trained tokens of all ranks."""

    tokens: float
    means: dict[str, float]
    """The loss, and means over the tokens."""
    maxima: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics to report."""
        return finish(self.means | self.maxima)


def combine(steps: Sequence[StepMetrics]) -> StepMetrics:
    """The steps of one batch as one: means weighted by each step's tokens."""
    tokens = sum(step.tokens for step in steps)
    shares = [step.tokens / max(tokens, 1) for step in steps]
    return StepMetrics(
        tokens=tokens,
        means={
            name: sum(share * step.means[name] for share, step in zip(shares, steps, strict=True))
            for name in steps[0].means
        },
        maxima={name: max(step.maxima[name] for step in steps) for name in steps[0].maxima},
    )


def sums(part: Contribution, loss: Tensor, tokens: int) -> dict[str, Tensor]:
    """The sums of this microbatch: its part of the batch's loss, counts and means."""
    found = {TOKENS: loss.new_tensor(tokens), "loss": loss.detach()}
    found |= {name: values_P.detach().sum() for name, values_P in part.mean.items()}
    return found if part.count is None else found | {COUNT: part.count}


def greatest(part: Contribution) -> dict[str, Tensor]:
    """The maxima of this microbatch; -inf without a trained token."""
    return {
        name: values_P.detach().amax() if len(values_P) else values_P.new_tensor(-math.inf)
        for name, values_P in part.maximum.items()
    }


def step_metrics(summed: Mapping[str, float], maxima: dict[str, float]) -> StepMetrics:
    """The metrics of a step, from sums and maxima over all its microbatches and ranks."""
    tokens = summed[TOKENS]
    means = {
        name: value if name == "loss" else value / max(tokens, 1)
        for name, value in summed.items()
        if name not in (TOKENS, COUNT)
    }
    return StepMetrics(tokens=tokens, means=means, maxima=maxima)

"""The input of a policy loss: the trained tokens of a microbatch, with sums over their sequences. Pure.

P counts trained tokens over all rows and sequences; every column is `[P]`. A microbatch has whole sequences. The tokens
of a sequence are adjacent and carry the same number (`documents_P`, ascending). Sums over sequences use
`segment_reduce`, which adds the tokens of a sequence in order, so they do not depend on the packing.

A token that was drawn under a form with weight c counts as the fraction c of a token in each sum and mean over its
sequence, so a sequence's ratio is the product of its tokens' ratios, each to the power of its c.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from goaly.trajectory import FORM_WEIGHTS

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Trained tokens. Only `logprobs_P` and `entropies_P` have a gradient, and only for kept tokens."""

    logprobs_P: torch.Tensor
    """The current policy's log-probability of each token."""
    entropies_P: torch.Tensor
    """The current policy's entropy at each token."""
    proximal_logprobs_P: torch.Tensor
    """The proximal policy's log-probability."""
    sampler_logprobs_P: torch.Tensor
    """The sampler's log-probability."""
    advantages_P: torch.Tensor
    ages_P: torch.Tensor
    """The age of each token in policy versions (i64)."""
    documents_P: torch.Tensor
    """The number of each token's sequence in the microbatch, ascending (i64)."""
    kept_P: torch.Tensor
    """False for tokens that a correction masks: they have no gradient and are left out of sequence sums."""
    columns: Columns
    """All of the batch's columns."""

    @property
    def ratio_P(self) -> torch.Tensor:
        """current / proximal."""
        return (self.logprobs_P - self.proximal_logprobs_P).exp()

    @property
    def form_weights_P(self) -> torch.Tensor | None:
        """The importance weight of each token's draw under a form; None if no answer has a form."""
        return self.columns.get(FORM_WEIGHTS)

    def without(self, left_out_P: torch.Tensor) -> "Tokens":
        """The same tokens with these masked."""
        kept_P = self.kept_P & ~left_out_P
        return replace(
            self,
            kept_P=kept_P,
            logprobs_P=torch.where(kept_P, self.logprobs_P, self.logprobs_P.detach()),
            entropies_P=torch.where(kept_P, self.entropies_P, self.entropies_P.detach()),
        )

    def sequence_sum(self, values_P: torch.Tensor) -> torch.Tensor:
        """For each token the sum over the kept tokens of its sequence."""
        return sequence_sum(torch.where(self.kept_P, values_P, 0.0), self.documents_P, self.form_weights_P)

    def sequence_mean(self, values_P: torch.Tensor) -> torch.Tensor:
        """For each token the mean over the kept tokens of its sequence; 0 if none is kept."""
        return self.sequence_sum(values_P) / _divisor(self.sequence_sum(torch.ones_like(values_P)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss of each token, and metrics: per-token values to average or to take the maximum of."""

    loss_P: torch.Tensor
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    maximum: dict[str, torch.Tensor] = field(default_factory=dict)


def sequence_sum(
    values_P: torch.Tensor, documents_P: torch.Tensor, weights_P: torch.Tensor | None = None
) -> torch.Tensor:
    """For each token the (weighted) sum over its whole sequence; differentiable."""
    if not len(values_P):
        return values_P
    if weights_P is not None:
        values_P = weights_P * values_P
    lengths_D = torch.bincount(documents_P)
    sums_D = torch.segment_reduce(values_P, "sum", lengths=lengths_D, initial=0.0, unsafe=True)
    return sums_D[documents_P]


def sequence_mean(
    values_P: torch.Tensor, documents_P: torch.Tensor, weights_P: torch.Tensor | None = None
) -> torch.Tensor:
    """For each token the (weighted) mean over the trained tokens of its sequence; differentiable."""
    lengths_P = sequence_sum(torch.ones_like(values_P), documents_P, weights_P)
    return sequence_sum(values_P, documents_P, weights_P) / _divisor(lengths_P)


def _divisor(lengths_P: torch.Tensor) -> torch.Tensor:
    """The lengths; where one is 0 the sum over it is, too, and so shall the mean be."""
    return lengths_P.clamp(min=torch.finfo(lengths_P.dtype).tiny)


def sequence_count(documents_P: torch.Tensor) -> torch.Tensor:
    """How many sequences these tokens belong to."""
    return (torch.bincount(documents_P) > 0).sum()

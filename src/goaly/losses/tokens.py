"""What a policy loss sees: the trained tokens of a microbatch, and what is known about each of them.

P counts trained tokens, whatever row and sequence they stand in; every column is `[P]`. Sequences come whole: what a
loss needs to know of a token's sequence it gets from `sequence_sum` and `sequence_mean`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from goaly.losses import segments

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Trained tokens. `logprobs_P` and `entropies_P` have a gradient where the token is kept, the others have none."""

    logprobs_P: torch.Tensor
    """The current policy's log-probability of each token."""
    entropies_P: torch.Tensor
    """The current policy's entropy where it drew the token."""
    proximal_logprobs_P: torch.Tensor
    """That of the policy from which the step may not go far."""
    sampler_logprobs_P: torch.Tensor
    """That of the policy that drew the token."""
    advantages_P: torch.Tensor
    ages_P: torch.Tensor
    """Policy versions made since the weights that drew the token (i64)."""
    documents_P: torch.Tensor
    """Number of the token's sequence within the microbatch, ascending (i64)."""
    kept_P: torch.Tensor
    """False where a correction leaves the token out: it has no gradient, and no part in what is said of a sequence."""
    columns: Columns
    """All of the batch's columns."""

    @property
    def ratio_P(self) -> torch.Tensor:
        """current / proximal."""
        return (self.logprobs_P - self.proximal_logprobs_P).exp()

    def without(self, left_out_P: torch.Tensor) -> "Tokens":
        """The same tokens, of which these are left out."""
        kept_P = self.kept_P & ~left_out_P
        return replace(
            self,
            kept_P=kept_P,
            logprobs_P=torch.where(kept_P, self.logprobs_P, self.logprobs_P.detach()),
            entropies_P=torch.where(kept_P, self.entropies_P, self.entropies_P.detach()),
        )

    def sequence_sum(self, values_P: torch.Tensor) -> torch.Tensor:
        """For each token the sum of the values over the kept tokens of its sequence."""
        return segments.sequence_sum(torch.where(self.kept_P, values_P, 0.0), self.documents_P)

    def sequence_mean(self, values_P: torch.Tensor) -> torch.Tensor:
        """For each token the mean of the values over the kept tokens of its sequence; 0 where none is kept."""
        lengths_P = segments.sequence_sum(self.kept_P.to(values_P.dtype), self.documents_P)
        return self.sequence_sum(values_P) / lengths_P.clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss's value for each token, and what to report: per-token values to average, or to take the top of."""

    loss_P: torch.Tensor
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    maximum: dict[str, torch.Tensor] = field(default_factory=dict)

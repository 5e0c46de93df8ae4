"""The samples of a whole batch with their rewards: what advantages are made of. Pure.

Shape suffixes: S samples of the batch, T tokens of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from goaly.losses import kl
from goaly.reward.settings import OverlongSettings
from goaly.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A batch's samples, in order, and the rewards that count."""

    samples: tuple[Trajectory, ...]
    rewards: tuple[Tensor, ...]
    """Each sample's rewards, f64 `[T]`: what its tokens were credited with, less what shaping takes off."""
    groups_S: Tensor
    """Number of each sample's group, ascending."""
    values: tuple[Tensor, ...] | None = None
    """A critic's value of each token, f64 `[T]`, 0 where it is not trained; only an estimator that needs it has it."""

    @property
    def totals_S(self) -> Tensor:
        """Each sample's reward, f64."""
        return torch.stack([rewards_T.sum() for rewards_T in self.rewards])

    def group_mean(self, values_S: Tensor) -> Tensor:
        """For each sample the mean of its group."""
        return self._group_sum(values_S) / self.group_size_S

    def centred(self, values_S: Tensor) -> Tensor:
        """Each sample's distance from its group's mean; exactly 0 where a whole group is equal."""
        centred_S = values_S - self.group_mean(values_S)
        first_S = values_S[torch.searchsorted(self.groups_S, self.groups_S)]
        unequal_S = self._group_sum((values_S != first_S).double()) > 0
        return torch.where(unequal_S, centred_S, 0.0)

    @property
    def group_size_S(self) -> Tensor:
        """For each sample the number of samples in its group."""
        return torch.bincount(self.groups_S)[self.groups_S]

    def _group_sum(self, values_S: Tensor) -> Tensor:
        groups = int(self.groups_S[-1]) + 1
        return values_S.new_zeros(groups).index_add(0, self.groups_S, values_S)[self.groups_S]


def scored(groups: Sequence[Group], values: Sequence[Tensor] | None = None) -> Scored:
    """The groups' samples with the rewards that they came with, and a critic's values."""
    samples = tuple(sample for group in groups for sample in group.samples)
    sizes = torch.tensor([len(group.samples) for group in groups])
    return Scored(
        samples=samples,
        rewards=tuple(sample.tokens["rewards"].double() for sample in samples),
        groups_S=torch.arange(len(groups)).repeat_interleave(sizes),
        values=None if values is None else tuple(values_T.double() for values_T in values),
    )


def less_overlong(batch: Scored, settings: OverlongSettings) -> Scored:
    """The batch with long answers' rewards lowered, at their last trained token."""
    rewards = []
    for sample, rewards_T in zip(batch.samples, batch.rewards, strict=True):
        over = sample.trained_tokens - (settings.limit - settings.buffer)
        off_T = torch.zeros_like(rewards_T)
        if over > 0:
            off_T[int(sample.tokens["trained"].nonzero()[-1])] = settings.penalty * min(over / settings.buffer, 1.0)
        rewards.append(rewards_T - off_T)
    return replace(batch, rewards=tuple(rewards))


def less_divergence(batch: Scored, references: Sequence[Tensor], kl_coef: float, estimator: kl.Estimator) -> Scored:
    """The batch with each trained token's divergence of the sampler from the reference (log-probs `[T]`) taken off."""
    rewards = []
    for sample, rewards_T, reference_T in zip(batch.samples, batch.rewards, references, strict=True):
        kl_T = kl.divergence(estimator, sample.tokens["sampler_logprobs"].double(), reference_T.double())
        rewards.append(rewards_T - kl_coef * torch.where(sample.tokens["trained"], kl_T, 0.0))
    return replace(batch, rewards=tuple(rewards))

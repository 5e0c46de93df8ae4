"""The samples of a whole batch with their rewards: the input of advantage estimators. Pure.

Shape suffixes: S samples of the batch, T tokens of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from goaly.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The samples of a batch, in order, and their rewards after shaping."""

    samples: tuple[Trajectory, ...]
    rewards: tuple[Tensor, ...]
    """The rewards of each sample's tokens, f64 `[T]`, after shaping."""
    groups_S: Tensor
    """The number of each sample's group, ascending."""
    values: tuple[Tensor, ...] | None = None
    """A critic's value of each token, f64 `[T]`, 0 where it is not trained; None without `@needs_values`."""

    @property
    def totals_S(self) -> Tensor:
        """Each sample's reward, f64."""
        return torch.stack([rewards_T.sum() for rewards_T in self.rewards])

    def group_mean(self, values_S: Tensor) -> Tensor:
        """For each sample the mean of its group."""
        return self._group_sum(values_S) / self.group_size_S

    def centred(self, values_S: Tensor) -> Tensor:
        """Each sample's distance from its group's mean; exactly 0 if all values of the group are equal."""
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
    """The samples of these groups with their rewards, and a critic's values."""
    samples = tuple(sample for group in groups for sample in group.samples)
    sizes = torch.tensor([len(group.samples) for group in groups])
    return Scored(
        samples=samples,
        rewards=tuple(sample.tokens["rewards"].double() for sample in samples),
        groups_S=torch.arange(len(groups)).repeat_interleave(sizes),
        values=None if values is None else tuple(values_T.double() for values_T in values),
    )

"""Advantage estimators: from the rewards of a batch to the advantage of each token. Pure functions.

An estimator takes the batch (`Scored`) and returns one value for each sample, f64 `[S]`, or a tensor `[T]` for each
sample, with a value for each token. `docs/algorithms.md` has the formulas and references. To add one, write the
function and decorate it with `@ESTIMATORS.register(name)`, or name it by its path in the settings.

- `@needs_values`: it reads a critic's values, and returns an `Estimate` with the returns that the critic learns.
- `@compares_groups`: a group whose samples all have the same total gives it no signal.

Shape suffixes: S samples of the batch, T tokens of one sample, A trained tokens of one sample, in order. In generalized
advantage estimation only trained tokens are steps, and the value of a token is that of the state before it is written.

Estimators that compare a sample with its group give advantages of exactly 0 to a group of equal rewards, and those that
compare it with the batch to a batch of equal rewards: rounding makes no signal. Estimators over a critic's values are
exempt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from goaly.base.config.settings import NonNegativeFloat, Share
from goaly.base.registry import Registry
from goaly.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The samples of a batch, in order, and their rewards after shaping."""

    samples: tuple[Trajectory, ...]
    rewards: tuple[Tensor, ...]
    """The rewards of each sample's tokens, f64 `[T]`, after shaping."""
    groups_S: Tensor
    """The number of each sample's group, ascending."""
    episodes_S: Tensor
    """The number of each sample's episode, ascending: an episode may make several samples."""
    values: tuple[Tensor, ...] | None = None
    """A critic's value of each token, f64 `[T]`, 0 where it is not trained; None without `@needs_values`."""

    @property
    def totals_S(self) -> Tensor:
        """Each sample's reward, f64."""
        return torch.stack([rewards_T.sum() for rewards_T in self.rewards])

    def group_mean(self, values_S: Tensor) -> Tensor:
        """For each sample the mean of its group, in which each episode counts once, as the mean of its samples."""
        return self._group_sum(values_S) / self.group_size_S

    def centred(self, values_S: Tensor) -> Tensor:
        """Each sample's distance from its group's mean; exactly 0 if all values of the group are equal."""
        centred_S = values_S - self.group_mean(values_S)
        first_S = values_S[torch.searchsorted(self.groups_S, self.groups_S)]
        unequal_S = self._group_sum((values_S != first_S).double()) > 0
        return torch.where(unequal_S, centred_S, 0.0)

    def episode_mean(self, values_S: Tensor) -> Tensor:
        """For each sample the mean of its episode's samples."""
        episodes = int(self.episodes_S[-1]) + 1
        sums_E = values_S.new_zeros(episodes).index_add(0, self.episodes_S, values_S)
        return sums_E[self.episodes_S] / self.episode_size_S

    @property
    def episode_size_S(self) -> Tensor:
        """For each sample the number of samples of its episode."""
        return torch.bincount(self.episodes_S)[self.episodes_S]

    @property
    def group_size_S(self) -> Tensor:
        """For each sample the number of episodes in its group."""
        return self._group_sum(torch.ones(len(self.samples), dtype=torch.float64)).round().long()

    def _group_sum(self, values_S: Tensor) -> Tensor:
        """For each sample the sum over its group's episodes of the mean of their samples."""
        groups = int(self.groups_S[-1]) + 1
        of_episodes_S = values_S / self.episode_size_S
        return values_S.new_zeros(groups).index_add(0, self.groups_S, of_episodes_S)[self.groups_S]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The advantages, and with a critic the returns, of each sample."""

    advantages: Tensor | Sequence[Tensor]
    returns: Sequence[Tensor] | None = None
    """The targets of the critic's values, `[T]`; None without a critic."""


Estimator = Callable[..., Tensor | Sequence[Tensor] | Estimate]
"""A function of a `Scored`; its keyword-only parameters are its options."""

F = TypeVar("F", bound=Estimator)

ESTIMATORS: Registry[Estimator] = Registry("advantage")


def needs_values(estimator: F) -> F:
    """Mark an estimator that needs a critic's values."""
    estimator.needs = ("values",)  # type: ignore[attr-defined]
    return estimator


def compares_groups(estimator: F) -> F:
    """Mark an estimator that only uses how a sample's total differs from the other totals of its group."""
    estimator.compares_groups = True  # type: ignore[attr-defined]
    return estimator


def needs(name: str) -> tuple[str, ...]:
    """The columns that later stages must add to a batch before this estimator can run."""
    return getattr(ESTIMATORS.find(name), "needs", ())


@ESTIMATORS.register("group")
@compares_groups
def group(batch: Scored, *, epsilon: NonNegativeFloat = 1e-6) -> Tensor:
    """Distance from the group's mean in standard deviations (population)."""
    centred_S = batch.centred(batch.totals_S)
    return _quotient(centred_S, batch.group_mean(centred_S.square()).sqrt() + epsilon)


@ESTIMATORS.register("group_mean")
@compares_groups
def group_mean(batch: Scored) -> Tensor:
    """Distance from the group's mean; hard and easy prompts keep their own scale."""
    return batch.centred(batch.totals_S)


@ESTIMATORS.register("rloo")
@compares_groups
def rloo(batch: Scored) -> Tensor:
    """Distance from the mean of the group's other episodes; 0 for an episode alone in its group."""
    others_S = batch.group_size_S - 1
    own_S = batch.centred(batch.episode_mean(batch.totals_S))  # others' mean = group's mean - own / others
    return torch.where(others_S > 0, batch.centred(batch.totals_S) + own_S / others_S.clamp(min=1), 0.0)


@ESTIMATORS.register("maxrl")
@compares_groups
def maxrl(batch: Scored) -> Tensor:
    """Distance from the group's mean in units of that mean, for rewards of 0 or more: the rarer a success in its group,
    the more it counts. 0 where the mean is not above 0."""
    totals_S = batch.totals_S
    mean_S = batch.group_mean(totals_S)
    return torch.where(mean_S > 0, _quotient(batch.centred(totals_S), mean_S), 0.0)


@ESTIMATORS.register("reinforce_pp")
def reinforce_pp(batch: Scored, *, gamma: Share = 1.0, epsilon: NonNegativeFloat = 1e-6) -> list[Tensor]:
    """The discounted reward from each trained token on, normalized over all trained tokens of the batch."""
    values = []
    for sample, rewards_T in zip(batch.samples, batch.rewards, strict=True):
        trained_T = sample.tokens["trained"]
        returns_A = to_go(rewards_of_steps(rewards_T, trained_T), gamma)
        values.append(torch.zeros_like(rewards_T).masked_scatter(trained_T, returns_A))
    return normalized(batch, values, epsilon)


@ESTIMATORS.register("reinforce_pp_baseline")
@compares_groups
def reinforce_pp_baseline(batch: Scored, *, epsilon: NonNegativeFloat = 1e-6) -> list[Tensor]:
    """Distance from the group's mean, normalized over all trained tokens of the batch."""
    centred_S = batch.centred(batch.totals_S)
    values = [value.expand(len(sample)) for sample, value in zip(batch.samples, centred_S, strict=True)]
    return normalized(batch, values, epsilon)


@ESTIMATORS.register("process")
def process(batch: Scored, *, epsilon: NonNegativeFloat = 1e-6) -> list[Tensor]:
    """The rewards from each step on, in standard deviations from the mean of all steps of the group.

    A step is a trained turn and everything up to the next one, so a reward in between belongs to it. In that mean each
    trajectory of an episode counts by its part of them.
    """
    part_S = 1 / batch.episode_size_S.double()
    steps = [_steps(sample) for sample in batch.samples]
    rewards = [
        torch.stack([rewards_T[start:stop].sum() for start, stop in found]) if found else rewards_T[:0]
        for rewards_T, found in zip(batch.rewards, steps, strict=True)
    ]
    found = []
    for number in range(int(batch.groups_S[-1]) + 1):
        members = (batch.groups_S == number).nonzero().flatten().tolist()
        of_group = torch.cat([rewards[member] for member in members])
        part = torch.cat([part_S[member].expand(len(rewards[member])) for member in members])
        flat = not len(of_group) or bool((of_group == of_group[0]).all())
        if not flat:
            mean = (part * of_group).sum() / part.sum()
            deviation = ((part * (of_group - mean).square()).sum() / part.sum()).sqrt()
        for member in members:
            scaled = torch.zeros_like(rewards[member])
            if not flat:
                scaled = (rewards[member] - mean) / (deviation + epsilon)
            values_T = torch.zeros_like(batch.rewards[member])
            for (start, stop), value in zip(steps[member], to_go(scaled), strict=True):
                values_T[start:stop] = value
            found.append(values_T)
    return found


@ESTIMATORS.register("gae")
@needs_values
def generalized(batch: Scored, *, gamma: Share = 1.0, lam: Share = 0.95, normalize: bool = True) -> Estimate:
    """Generalized advantages over a critic's values; returns are not normalized."""
    assert batch.values is not None, "`estimate` runs once the critic's values are there"
    found, returns = [], []
    for sample, rewards_T, values_T in zip(batch.samples, batch.rewards, batch.values, strict=True):
        trained_T = sample.tokens["trained"]
        rewards_A = rewards_of_steps(rewards_T, trained_T)
        advantages_A, returns_A = gae(rewards_A, values_T[trained_T], gamma=gamma, lam=lam)
        found.append(torch.zeros_like(values_T).masked_scatter(trained_T, advantages_A))
        returns.append(torch.zeros_like(values_T).masked_scatter(trained_T, returns_A))
    return Estimate(advantages=normalized(batch, found, 1e-6) if normalize else found, returns=returns)


def gae(
    rewards_A: torch.Tensor, values_A: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(advantages_A, returns_A)` of one trajectory, in the values' dtype (Schulman et al., arXiv:1506.02438).

    With `delta_t = r_t + gamma * V_{t+1} - V_t`, `A_t = delta_t + gamma * lam * A_{t+1}`; the return, which the critic
    learns, is `A_t + V_t`. V is 0 after the last step.
    """
    following_A = torch.cat([values_A[1:], values_A.new_zeros(1)])[: len(values_A)]
    advantages_A = to_go(rewards_A + gamma * following_A - values_A, gamma * lam)
    return advantages_A, advantages_A + values_A


def to_go(values: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """For each step the discounted sum of its own and all later values; summed in float64."""
    if discount == 1:
        return values.double().flip(0).cumsum(0).flip(0).to(values)
    sums, later = [], 0.0
    for value in reversed(values.double().tolist()):
        later = value + discount * later
        sums.append(later)
    return torch.tensor(sums[::-1], dtype=torch.float64).to(values)


def rewards_of_steps(rewards_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """The reward of each step `[A]`: that of its token, and of the untrained tokens before the next step.

    Rewards before the first step are dropped.
    """
    step_T = trained_T.cumsum(0) - 1
    after = step_T >= 0
    steps_A = rewards_T.new_zeros(int(trained_T.sum()))
    return steps_A.index_add(0, step_T[after], rewards_T[after])


def normalized(batch: Scored, values: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """The values `[T]` in standard deviations (population) from the mean, both over all trained tokens of the batch."""
    trained = [sample.tokens["trained"] for sample in batch.samples]
    of_batch = torch.cat([values_T[trained_T] for values_T, trained_T in zip(values, trained, strict=True)])
    if not len(of_batch) or bool((of_batch == of_batch[0]).all()):
        return [torch.zeros_like(values_T) for values_T in values]
    mean, deviation = of_batch.mean(), of_batch.std(correction=0)
    return [(values_T - mean) / (deviation + epsilon) for values_T in values]


def _steps(sample: Trajectory) -> list[tuple[int, int]]:
    trained_T = sample.tokens["trained"]
    starts = [turn.start for turn in sample.turns if bool(trained_T[turn.start : turn.stop].any())]
    return list(pairwise([*starts, len(sample)]))


def _quotient(values_S: Tensor, scale_S: Tensor) -> Tensor:
    """The quotient; 0 where the value is 0."""
    return torch.where(values_S == 0, 0.0, values_S / scale_S)

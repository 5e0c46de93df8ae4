"""What a batch's rewards say about each of its tokens. Pure functions, found by name or path.

An estimator takes the batch (`Scored`) and gives a value for each sample, f64 `[S]`, which all its trained tokens get,
or a tensor `[T]` for each sample, a value for each token. `docs/algorithms.md` has the formulas and references. To add
one, write the function and decorate it with `@ESTIMATORS.register(name)`, or name it by its path. With `@of_values` it
sees a critic's values, and gives an `Estimate`: beside the advantages the returns that the critic learns. With
`@compares_groups` it says that a group whose samples all have the same total teaches it nothing.

Invariants
    AV-1  Where samples are compared with their group alone, a group of equal rewards has advantages of exactly 0, and
          where with the batch, a batch of equal rewards: rounding makes no signal. (With a critic's values it may: they
          are what rewards are compared with.)
    AV-2  Only trained tokens carry an advantage or a return.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from goaly.registry import Must, Registry, Share
from goaly.reward.gae import gae, rewards_of_steps, to_go
from goaly.reward.scored import Scored, less_divergence, less_overlong, scored
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What an estimator says of each sample."""

    advantages: Tensor | Sequence[Tensor]
    returns: Sequence[Tensor] | None = None
    """What a critic's values should have been, `[T]`; None where there is no critic."""


Estimator = Callable[..., Tensor | Sequence[Tensor] | Estimate]
"""Function of a `Scored`, with options after `*`."""

F = TypeVar("F", bound=Estimator)

ESTIMATORS: Registry[Estimator] = Registry("advantage")
Epsilon = Annotated[float, Must("be a number of at least 0", lambda value: 0 <= value < inf)]


def of_values(estimator: F) -> F:
    """Mark an estimator that needs a critic's values."""
    estimator.needs = ("values",)  # type: ignore[attr-defined]
    return estimator


def compares_groups(estimator: F) -> F:
    """Mark an estimator that takes from each sample's total only how it differs from its group's other totals."""
    estimator.compares_groups = True  # type: ignore[attr-defined]
    return estimator


def needs(name: str) -> tuple[str, ...]:
    """The columns that later stages must add to a batch before this estimator can be asked."""
    return getattr(ESTIMATORS.find(name), "needs", ())


@ESTIMATORS.register("group")
@compares_groups
def group(batch: Scored, *, epsilon: Epsilon = 1e-6) -> Tensor:
    """Distance from the group's mean in standard deviations (population)."""
    centred_S = batch.centred(batch.totals_S)
    return _over(centred_S, batch.group_mean(centred_S.square()).sqrt() + epsilon)


@ESTIMATORS.register("group_mean")
@compares_groups
def group_mean(batch: Scored) -> Tensor:
    """Distance from the group's mean; hard and easy prompts keep their own scale."""
    return batch.centred(batch.totals_S)


@ESTIMATORS.register("rloo")
@compares_groups
def rloo(batch: Scored) -> Tensor:
    """Distance from the mean of the group's other samples; a sample alone in its group has none, and gets 0."""
    others_S = (batch.group_size_S - 1).clamp(min=1)
    return batch.centred(batch.totals_S) * batch.group_size_S / others_S


@ESTIMATORS.register("reinforce_pp")
def reinforce_pp(batch: Scored, *, gamma: Share = 1.0, epsilon: Epsilon = 1e-6) -> list[Tensor]:
    """The discounted reward from each trained token on, normalized over all trained tokens of the batch."""
    values = []
    for sample, rewards_T in zip(batch.samples, batch.rewards, strict=True):
        trained_T = sample.tokens["trained"]
        returns_A = to_go(rewards_of_steps(rewards_T, trained_T), gamma)
        values.append(torch.zeros_like(rewards_T).masked_scatter(trained_T, returns_A))
    return normalized(batch, values, epsilon)


@ESTIMATORS.register("reinforce_pp_baseline")
@compares_groups
def reinforce_pp_baseline(batch: Scored, *, epsilon: Epsilon = 1e-6) -> list[Tensor]:
    """Distance from the group's mean, normalized over all trained tokens of the batch."""
    centred_S = batch.centred(batch.totals_S)
    values = [value.expand(len(sample)) for sample, value in zip(batch.samples, centred_S, strict=True)]
    return normalized(batch, values, epsilon)


@ESTIMATORS.register("process")
def process(batch: Scored, *, epsilon: Epsilon = 1e-6) -> list[Tensor]:
    """The rewards from each step on, in standard deviations from the mean of all steps of the group.

    A step is a turn that is trained, and all that follows until the next one: a credit in between is its.
    """
    steps = [_steps(sample) for sample in batch.samples]
    rewards = [
        torch.stack([rewards_T[start:stop].sum() for start, stop in found]) if found else rewards_T[:0]
        for rewards_T, found in zip(batch.rewards, steps, strict=True)
    ]
    found = []
    for number in range(int(batch.groups_S[-1]) + 1):
        members = (batch.groups_S == number).nonzero().flatten().tolist()
        of_group = torch.cat([rewards[member] for member in members])
        flat = not len(of_group) or bool((of_group == of_group[0]).all())  # AV-1
        for member in members:
            scaled = torch.zeros_like(rewards[member])
            if not flat:
                scaled = (rewards[member] - of_group.mean()) / (of_group.std(correction=0) + epsilon)
            values_T = torch.zeros_like(batch.rewards[member])
            for (start, stop), value in zip(steps[member], to_go(scaled), strict=True):
                values_T[start:stop] = value
            found.append(values_T)
    return found


@ESTIMATORS.register("gae")
@of_values
def generalized(batch: Scored, *, gamma: Share = 1.0, lam: Share = 0.95, normalize: bool = True) -> Estimate:
    """Generalized advantages over a critic's values; the critic learns the returns as they are before normalizing."""
    assert batch.values is not None, "advantages over values wait for the critic's"
    found, returns = [], []
    for sample, rewards_T, values_T in zip(batch.samples, batch.rewards, batch.values, strict=True):
        trained_T = sample.tokens["trained"]
        rewards_A = rewards_of_steps(rewards_T, trained_T)
        advantages_A, returns_A = gae(rewards_A, values_T[trained_T], gamma=gamma, lam=lam)
        found.append(torch.zeros_like(values_T).masked_scatter(trained_T, advantages_A))
        returns.append(torch.zeros_like(values_T).masked_scatter(trained_T, returns_A))
    return Estimate(advantages=normalized(batch, found, 1e-6) if normalize else found, returns=returns)


def estimate(
    groups: Sequence[Group], settings: AdvantageSettings, later: Mapping[str, Sequence[Tensor]] | None = None
) -> Estimate:
    """Each sample's advantages, and returns where there is a critic: f32 `[T]`.

    `later` holds, for each column that `settings.needs`, that of each sample.
    """
    later = later or {}
    assert set(settings.needs) <= set(later), "advantages wait for what later stages add"
    batch = scored(groups, later.get("values"))
    if settings.overlong is not None:
        batch = less_overlong(batch, settings.overlong)
    if settings.kl_coef > 0:
        batch = less_divergence(batch, later["reference_logprobs"], settings.kl_coef, settings.kl_estimator)
    given = ESTIMATORS.bound(settings.name, settings.options)(batch)
    if not isinstance(given, Estimate):
        given = Estimate(advantages=given)
    for column in (given.advantages, given.returns):
        if column is not None and len(column) != len(batch.samples):
            raise ValueError(
                f"advantages.name={settings.name}: gave {len(column)} values for {len(batch.samples)} samples"
            )
    return Estimate(
        advantages=_on_trained(batch, given.advantages),
        returns=None if given.returns is None else _on_trained(batch, given.returns),
    )


def has_signal(rewards: list[float]) -> bool:
    """Whether the samples differ in reward at all."""
    return max(rewards) > min(rewards)


def spread(trained_T: Tensor, value: Tensor) -> Tensor:
    """The value, one or one a token, on each trained token, 0 elsewhere: f32 `[T]` (AV-2)."""
    return torch.where(trained_T, value.float(), 0.0)


def normalized(batch: Scored, values: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """The values `[T]` in standard deviations (population) from the mean, both over all trained tokens of the batch."""
    trained = [sample.tokens["trained"] for sample in batch.samples]
    of_batch = torch.cat([values_T[trained_T] for values_T, trained_T in zip(values, trained, strict=True)])
    if not len(of_batch) or bool((of_batch == of_batch[0]).all()):
        return [torch.zeros_like(values_T) for values_T in values]  # AV-1
    mean, deviation = of_batch.mean(), of_batch.std(correction=0)
    return [(values_T - mean) / (deviation + epsilon) for values_T in values]


def _on_trained(batch: Scored, values: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [spread(sample.tokens["trained"], value) for sample, value in zip(batch.samples, values, strict=True)]


def _steps(sample: Trajectory) -> list[tuple[int, int]]:
    trained_T = sample.tokens["trained"]
    starts = [turn.start for turn in sample.turns if bool(trained_T[turn.start : turn.stop].any())]
    return list(pairwise([*starts, len(sample)]))


def _over(values_S: Tensor, scale_S: Tensor) -> Tensor:
    """The quotient; 0 of anything is 0."""
    return torch.where(values_S == 0, 0.0, values_S / scale_S)

"""What a batch's rewards say about each of its tokens. Pure functions, found by name or path.

An estimator takes the batch (`Scored`) and gives a value for each sample, f64 `[S]`, which all its trained tokens get,
or a tensor `[T]` for each sample, a value for each token. `docs/algorithms.md` has the formulas and references. To add
one, write the function and decorate it with `@ESTIMATORS.register(name)`, or name it by its path.

Invariants
    AV-1  Where samples are compared with their group alone, a group of equal rewards has advantages of exactly 0, and
          where with the batch, a batch of equal rewards: rounding makes no signal.
    AV-2  Only trained tokens carry an advantage.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from goaly.registry import NotNegative, Registry
from goaly.reward.scored import Scored, less_divergence, less_overlong, scored
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, Trajectory

Estimator = Callable[..., Tensor | Sequence[Tensor]]
"""Function of a `Scored`, with options after `*`."""

ESTIMATORS: Registry[Estimator] = Registry("advantage")


@ESTIMATORS.register("group")
def group(batch: Scored, *, epsilon: NotNegative = 1e-6) -> Tensor:
    """Distance from the group's mean in standard deviations (population)."""
    centred_S = batch.centred(batch.totals_S)
    return _over(centred_S, batch.group_mean(centred_S.square()).sqrt() + epsilon)


@ESTIMATORS.register("group_mean")
def group_mean(batch: Scored) -> Tensor:
    """Distance from the group's mean; hard and easy prompts keep their own scale."""
    return batch.centred(batch.totals_S)


@ESTIMATORS.register("rloo")
def rloo(batch: Scored) -> Tensor:
    """Distance from the mean of the group's other samples; a sample alone in its group has none, and gets 0."""
    others_S = (batch.group_size_S - 1).clamp(min=1)
    return batch.centred(batch.totals_S) * batch.group_size_S / others_S


@ESTIMATORS.register("reinforce_pp")
def reinforce_pp(batch: Scored, *, epsilon: NotNegative = 1e-6) -> list[Tensor]:
    """The reward from each token on, normalized over all trained tokens of the batch."""
    return normalized(batch, [to_go(rewards_T) for rewards_T in batch.rewards], epsilon)


@ESTIMATORS.register("reinforce_pp_baseline")
def reinforce_pp_baseline(batch: Scored, *, epsilon: NotNegative = 1e-6) -> list[Tensor]:
    """Distance from the group's mean, normalized over all trained tokens of the batch."""
    centred_S = batch.centred(batch.totals_S)
    values = [value.expand(len(sample)) for sample, value in zip(batch.samples, centred_S, strict=True)]
    return normalized(batch, values, epsilon)


@ESTIMATORS.register("process")
def process(batch: Scored, *, epsilon: NotNegative = 1e-6) -> list[Tensor]:
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


def advantages(
    groups: Sequence[Group], settings: AdvantageSettings, references: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Each sample's advantages, f32 `[T]`; `references` are its reference log-probs, which a `kl_coef` needs."""
    batch = scored(groups)
    if settings.overlong is not None:
        batch = less_overlong(batch, settings.overlong)
    if settings.kl_coef > 0:
        assert references is not None, "advantages with a KL term wait for the reference's log-probs"
        batch = less_divergence(batch, references, settings.kl_coef, settings.kl_estimator)
    values = ESTIMATORS.bound(settings.name, settings.options)(batch)
    if len(values) != len(batch.samples):
        raise ValueError(f"advantages.name={settings.name}: gave {len(values)} values for {len(batch.samples)} samples")
    return [spread(sample.tokens["trained"], value) for sample, value in zip(batch.samples, values, strict=True)]


def has_signal(rewards: list[float]) -> bool:
    """Whether the samples differ in reward at all."""
    return max(rewards) > min(rewards)


def spread(trained_T: Tensor, value: Tensor) -> Tensor:
    """The advantage, one or one a token, on each trained token, 0 elsewhere: f32 `[T]` (AV-2)."""
    return torch.where(trained_T, value.float(), 0.0)


def to_go(rewards_T: Tensor) -> Tensor:
    """The sum of each token's own and all later rewards."""
    return rewards_T.flip(0).cumsum(0).flip(0)


def normalized(batch: Scored, values: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """The values `[T]` in standard deviations from the mean, both over all trained tokens of the batch."""
    trained = [sample.tokens["trained"] for sample in batch.samples]
    of_batch = torch.cat([values_T[trained_T] for values_T, trained_T in zip(values, trained, strict=True)])
    if not len(of_batch) or bool((of_batch == of_batch[0]).all()):
        return [torch.zeros_like(values_T) for values_T in values]  # AV-1
    mean, deviation = of_batch.mean(), of_batch.std(correction=0)
    return [(values_T - mean) / (deviation + epsilon) for values_T in values]


def _steps(sample: Trajectory) -> list[tuple[int, int]]:
    trained_T = sample.tokens["trained"]
    starts = [turn.start for turn in sample.turns if bool(trained_T[turn.start : turn.stop].any())]
    return list(pairwise([*starts, len(sample)]))


def _over(values_S: Tensor, scale_S: Tensor) -> Tensor:
    """The quotient; 0 of anything is 0."""
    return torch.where(values_S == 0, 0.0, values_S / scale_S)

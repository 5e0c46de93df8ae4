"""From finished groups to advantages, as the settings say: shape the rewards, then run the estimator. Pure.

Only trained tokens carry an advantage or a return.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from goaly.base.watchdog import Work
from goaly.losses import kl
from goaly.reward.advantages import ESTIMATORS, Estimate, Scored
from goaly.reward.settings import AdvantageSettings, OverlongSettings
from goaly.trajectory import FORM_WEIGHTS, Group


def estimate(
    groups: Sequence[Group], settings: AdvantageSettings, later: Mapping[str, Sequence[Tensor]] | None = None
) -> Estimate:
    """The advantages of each sample, and its returns if there is a critic: f32 `[T]`.

    `later` holds each column in `settings.needs`, as one tensor `[T]` a sample.
    """
    later = later or {}
    assert set(settings.needs) <= set(later), "the caller waits for the columns that later stages add"
    batch = scored(groups, later.get("values"))
    if settings.overlong is not None:
        batch = penalize_overlong(batch, settings.overlong)
    if settings.kl_coef > 0:
        batch = penalize_divergence(batch, later["reference_logprobs"], settings.kl_coef, settings.kl_estimator)
    with Work(f"advantages.name={settings.name}"):  # which may be the user's own
        given = ESTIMATORS.bound(settings.name, settings.options)(batch)
    if not isinstance(given, Estimate):
        given = Estimate(advantages=given)
    for column in (given.advantages, given.returns):
        if column is not None and len(column) != len(batch.samples):
            raise ValueError(
                f"advantages.name={settings.name}: returned {len(column)} values for {len(batch.samples)} samples"
            )
    return Estimate(
        advantages=_on_trained(batch, given.advantages),
        returns=None if given.returns is None else _on_trained(batch, given.returns),
    )


def penalize_overlong(batch: Scored, settings: OverlongSettings) -> Scored:
    """The batch with a penalty on long answers, at their last trained token."""
    rewards = []
    for sample, rewards_T in zip(batch.samples, batch.rewards, strict=True):
        over = sample.trained_tokens - (settings.limit - settings.buffer)
        off_T = torch.zeros_like(rewards_T)
        if over > 0:
            off_T[int(sample.tokens["trained"].nonzero()[-1])] = settings.penalty * min(over / settings.buffer, 1.0)
        rewards.append(rewards_T - off_T)
    return replace(batch, rewards=tuple(rewards))


def penalize_divergence(
    batch: Scored, references: Sequence[Tensor], kl_coef: float, estimator: kl.KlEstimator
) -> Scored:
    """The batch with a penalty on each trained token: the sampler's divergence from the reference (log-probs `[T]`)."""
    rewards = []
    for sample, rewards_T, reference_T in zip(batch.samples, batch.rewards, references, strict=True):
        kl_T = kl.divergence(estimator, sample.tokens["sampler_logprobs"].double(), reference_T.double())
        weight_T = sample.tokens.get(FORM_WEIGHTS, torch.ones_like(rewards_T))
        rewards.append(rewards_T - kl_coef * torch.where(sample.tokens["trained"], weight_T * kl_T, 0.0))
    return replace(batch, rewards=tuple(rewards))


def _on_trained(batch: Scored, values: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Each sample's value (one, or one for each token) on its trained tokens, 0 elsewhere: f32 `[T]`."""
    trained = (sample.tokens["trained"] for sample in batch.samples)
    return [torch.where(trained_T, value.float(), 0.0) for trained_T, value in zip(trained, values, strict=True)]


def scored(groups: Sequence[Group], values: Sequence[Tensor] | None = None) -> Scored:
    """The samples of these groups with their rewards, and a critic's values."""
    samples = tuple(sample for group in groups for sample in group.samples)
    sizes = torch.tensor([len(group.samples) for group in groups])
    of_episodes = torch.tensor([len(episode) for group in groups for episode in group.episodes])
    return Scored(
        samples=samples,
        rewards=tuple(sample.tokens["rewards"].double() for sample in samples),
        groups_S=torch.arange(len(groups)).repeat_interleave(sizes),
        episodes_S=torch.arange(len(of_episodes)).repeat_interleave(of_episodes),
        values=None if values is None else tuple(values_T.double() for values_T in values),
    )

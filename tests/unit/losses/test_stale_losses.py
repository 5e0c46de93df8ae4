"""What corrections are for, in seconds: a small policy learns from tokens that are all as old as the bound allows.

The policy is linear in features that the positions share, so that what is pushed at one place is felt at others: there
uncorrected tokens go on pushing when their lesson has long been learned.
"""

from statistics import fmean

import pytest
import torch

from goaly.backlog.staleness import StalenessBound
from goaly.losses.objective import PolicyObjective, finish
from goaly.losses.settings import LossSettings, Rejection
from goaly.losses.tokens import Tokens

STEPS, SEEDS = 160, 4
PROMPTS, SAMPLES, LENGTH = 4, 16, 3
CONTEXTS, FEATURES, CHOICES = 20, 12, 4
LR = 0.1
RECOMMENDED = LossSettings(
    name="reinforce",
    proximal="trainer",
    importance="sequence",
    importance_cap=2.0,
    rejections=(Rejection(measure="ratio", level="token", low=0.5),),
)
"""That of `configs/recipes/stale.yaml`."""
UNCORRECTED = LossSettings(name="tests.unit.losses.test_stale_losses:uncorrected")


def uncorrected(tokens: Tokens) -> torch.Tensor:
    """`-A log p`: the policy gradient as if the tokens came from the current policy."""
    return -tokens.advantages_P * tokens.logprobs_P


def learn(loss: LossSettings, max_staleness: int, seed: int) -> tuple[float, float]:
    """The pass rate in the end, and the mean effective sample size.

    A prompt is LENGTH contexts; an answer is right if it has the right choice at each of them.
    """
    generator = torch.Generator().manual_seed(seed)
    features_KD = torch.randn(CONTEXTS, FEATURES, generator=generator) / FEATURES**0.5
    right_K = torch.randint(0, CHOICES, (CONTEXTS,), generator=generator)
    weights_DV = torch.zeros(FEATURES, CHOICES, requires_grad=True)
    optimizer = torch.optim.Adam([weights_DV], lr=LR)
    admission, objective = StalenessBound(1, max_staleness, STEPS), PolicyObjective(loss)
    versions, sizes = [], []
    for version in range(STEPS):
        versions.append(weights_DV.detach().clone())
        sampled_by = admission.min_version(version)
        contexts_SL = torch.randint(0, CONTEXTS, (PROMPTS, LENGTH), generator=generator).repeat_interleave(SAMPLES, 0)
        sampler_SLV = (features_KD[contexts_SL] @ versions[sampled_by]).log_softmax(-1)
        choices_T = torch.multinomial(sampler_SLV.exp().flatten(0, 1), 1, generator=generator)
        logprobs_SLV = (features_KD[contexts_SL] @ weights_DV).log_softmax(-1)
        right_S = (choices_T.view_as(contexts_SL) == right_K[contexts_SL]).all(1).float()
        columns = {
            "sampler_logprobs": sampler_SLV.flatten(0, 1).gather(1, choices_T).squeeze(1),
            "sampler_versions": torch.full((len(choices_T),), sampled_by, dtype=torch.int32),
            "advantages": advantages(right_S).repeat_interleave(LENGTH),
            "documents": torch.arange(len(right_S)).repeat_interleave(LENGTH),
        }
        logprobs_P = logprobs_SLV.flatten(0, 1).gather(1, choices_T).squeeze(1)
        part = objective(logprobs_P, torch.zeros_like(logprobs_P), columns, version)
        metrics = finish({name: values_P.detach().mean().item() for name, values_P in part.mean.items()})
        sizes.append(metrics["effective_sample_size"])
        optimizer.zero_grad()
        (part.total / len(choices_T)).backward()
        optimizer.step()
    right_probability_K = (features_KD @ weights_DV.detach()).softmax(-1).gather(1, right_K[:, None])
    return right_probability_K.mean().item() ** LENGTH, fmean(sizes)


def advantages(rewards_S: torch.Tensor) -> torch.Tensor:
    """Distance from the mean of each prompt's samples, in deviations."""
    by_prompt = rewards_S.view(PROMPTS, SAMPLES)
    centred = by_prompt - by_prompt.mean(1, keepdim=True)
    return (centred / (by_prompt.std(1, correction=0, keepdim=True) + 1e-6)).flatten()


@pytest.fixture(scope="module")
def at_zero() -> list[float]:
    return [learn(RECOMMENDED, 0, seed)[0] for seed in range(SEEDS)]


@pytest.mark.parametrize("max_staleness", [8, 32])
def test_with_the_recommended_correction_stale_tokens_teach_as_much_as_fresh_ones(
    at_zero: list[float], max_staleness: int
) -> None:
    runs = [learn(RECOMMENDED, max_staleness, seed) for seed in range(SEEDS)]
    assert fmean(rate for rate, _ in runs) > fmean(at_zero) - 0.08
    assert fmean(size for _, size in runs) < 0.99  # the tokens were stale


def test_without_correction_old_tokens_teach_less(at_zero: list[float]) -> None:
    rates = [learn(UNCORRECTED, 32, seed)[0] for seed in range(SEEDS)]
    assert all(rate < fresh for rate, fresh in zip(rates, at_zero, strict=True))
    assert fmean(rates) < fmean(at_zero) - 0.12


def test_without_staleness_a_correction_changes_nothing() -> None:
    rate, size = learn(RECOMMENDED, 0, 0)
    assert size == pytest.approx(1, abs=1e-6)
    assert learn(UNCORRECTED, 0, 0) == pytest.approx((rate, size), abs=1e-3)

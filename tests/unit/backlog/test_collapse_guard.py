"""The guard fires soon after a collapse begins, and never on a run that learns, is flat, or is only noisy."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.collapse_guard import CollapseGuard
from goaly.backlog.guard_settings import GuardSettings

NOISE = 0.15
"""Deviation of a step's pass rate in `configs/grpo/tiny.yaml`: eight groups, whose prompts differ in difficulty."""


def alarms(rewards: Sequence[float], divergences: Sequence[float] | None = None, **changed: float) -> list[int]:
    """The steps after which the guard has a reason."""
    guard = CollapseGuard(GuardSettings(**changed))
    given_kl = divergences or [0.01] * len(rewards)
    verdicts = [
        guard.observe({"reward/mean": reward, "sampler_kl": kl}) for reward, kl in zip(rewards, given_kl, strict=True)
    ]
    return [step for step, verdict in enumerate(verdicts) if verdict.is_collapse]


def noisy(means: Sequence[float], noise: float, seed: int) -> list[float]:
    drawn = random.Random(seed)
    return [min(1.0, max(0.0, mean + drawn.gauss(0, noise))) for mean in means]


@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(0.0, 1.0),
    end=st.floats(0.0, 1.0),
    steps=st.integers(1, 400),
    noise=st.just(0.0) | st.floats(1e-6, NOISE),
    seed=st.integers(0, 10**6),
)
def test_it_never_fires_on_a_run_that_rises_or_stays_whatever_the_noise(
    start: float, end: float, steps: int, noise: float, seed: int
):
    low, high = sorted((start, end))
    means = [low + (high - low) * min(1.0, 3 * step / steps) for step in range(steps)]
    assert alarms(noisy(means, noise, seed)) == []


@settings(max_examples=60, deadline=None)
@given(
    best=st.floats(0.7, 1.0), before=st.integers(24, 300), noise=st.floats(0.01, NOISE / 2), seed=st.integers(0, 10**6)
)
def test_it_fires_within_two_windows_of_a_fall_to_nothing(best: float, before: int, noise: float, seed: int):
    means = [best] * before + [best * (1 - step / 8) for step in range(8)] + [0.0] * 16
    found = alarms(noisy(means, noise, seed))
    assert found
    assert before <= found[0] < before + 24


@pytest.mark.parametrize("scale", [-3.0, 100.0])
def test_a_reward_of_any_scale_and_sign_is_judged_alike(scale: float):
    rewards = noisy([0.9] * 40 + [0.0] * 20, 0.05, seed=1)
    falling = [abs(scale) * reward - (5.0 if scale < 0 else 0.0) for reward in rewards]
    assert alarms(falling) == alarms(rewards) != []


def test_a_divergence_counts_as_the_mean_of_a_window_so_a_single_spike_does_not():
    flat = [0.5] * 30
    assert alarms(flat, [0.01] * 20 + [3.0] + [0.01] * 9) == []
    assert alarms(flat, [0.01] * 20 + [3.0] * 2 + [0.01] * 8)[0] == 21
    assert alarms(flat, [2.0] * 30) == list(range(7, 30))


def test_one_failed_step_of_a_run_whose_answers_all_pass_is_no_collapse():
    assert alarms([1.0] * 300 + [0.9] + [1.0] * 20) == []


def test_a_verdict_is_new_only_when_the_step_before_had_no_signal():
    guard = CollapseGuard(GuardSettings(window=2))
    verdicts = [guard.observe({"sampler_kl": kl}) for kl in (0.0, 2.0, 2.0, 0.0, 0.0, 2.0)]
    assert [verdict.is_new for verdict in verdicts] == [False, True, False, False, False, True]
    assert [verdict.is_collapse for verdict in verdicts] == [False, True, True, True, False, True]
    assert "guard.kl=0.5" in verdicts[1].reasons[0]


def test_metrics_that_a_run_does_not_have_are_no_signals():
    assert not CollapseGuard(GuardSettings(window=1)).observe({"loss": 1.0}).is_collapse

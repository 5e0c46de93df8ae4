"""The controlled staleness run, in small: a random model, ten steps, real engines in a child process."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from bench.lagged import Laboratory, LaggedSettings, Outcome
from bench.staleness import LOSSES, RECOMMENDED
from tests.loop.verifiers import share_of_digits

STEPS = 10
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def run(settings: LaggedSettings, bounds: list[int]) -> list[Outcome]:
    """A run at each bound, in this order, with one laboratory."""
    laboratory = Laboratory(settings, share_of_digits)
    return [laboratory.run(LOSSES[RECOMMENDED], bound, seed=3, lr=3e-3) for bound in bounds]


@pytest.fixture(scope="module")
def outcomes(tiny_model_folder: Path) -> list[Outcome]:
    settings = LaggedSettings(
        model=str(tiny_model_folder),
        steps=STEPS,
        groups_per_step=2,
        group_size=4,
        max_tokens=12,
        evaluate_every=5,
        evaluation_prompts=4,
        final_prompts=8,
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as child:
        return child.submit(run, settings, [0, 4, 0]).result()


def test_every_token_is_as_old_as_the_bound_allows_to_the_version(outcomes: list[Outcome]) -> None:
    for outcome, bound in zip(outcomes, (0, 4), strict=False):
        ages = [(step["age/mean"], step["age/max"]) for step in outcome.metrics]
        assert ages == [(min(version, bound),) * 2 for version in range(STEPS)]  # LA-1


def test_the_ratio_to_the_sampler_is_one_without_staleness_and_spreads_with_age(outcomes: list[Outcome]) -> None:
    fresh, stale, _ = outcomes
    assert all(step["effective_sample_size"] == pytest.approx(1, abs=1e-5) for step in fresh.metrics)
    assert all(abs(step["sampler_kl"]) < 1e-5 for step in fresh.metrics)
    assert stale.metrics[0]["sampler_kl"] == pytest.approx(0, abs=1e-5)
    assert all(step["sampler_kl"] > 1e-4 for step in stale.metrics[2:])
    assert all(0.1 < step["effective_sample_size"] < 1 for step in stale.metrics[2:])


def test_a_run_does_not_depend_on_those_before_it(outcomes: list[Outcome]) -> None:
    first, _, again = outcomes
    assert again == first  # LA-2


def test_held_out_prompts_are_asked_at_the_versions_that_were_promised(outcomes: list[Outcome]) -> None:
    assert [version for version, _ in outcomes[0].curve] == [0, 5, STEPS]
    assert all(step["grad_norm"] > 0 for outcome in outcomes for step in outcome.metrics)

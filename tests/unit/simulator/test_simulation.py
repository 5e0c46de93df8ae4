"""The simulator against cases whose answer is known without it."""

import pytest

from goaly.backlog.settings import BacklogSettings
from goaly.generate.settings import GeneratorSettings
from goaly.simulator.forecast import simulate
from goaly.simulator.profile import (
    DecodeRate,
    Distribution,
    EngineTimes,
    EpisodesProfile,
    Profile,
    StatedEpisodes,
    TrainingTimes,
)
from goaly.simulator.simulated_run import SimulatedRun

ANSWER = 50


def profile(*, step_seconds: float = 0.01, train_seconds: float = 1.0, sigma: float = 0.0, **changes) -> Profile:
    """Engines whose decode step takes as long whatever they run, and a trainer whose step does."""
    rates = tuple(DecodeRate(running=number, tokens_per_second=number / step_seconds) for number in (1, 2))
    values = {
        "training": (TrainingTimes(fixed_seconds=train_seconds, seconds_per_token=1e-12),),
        "engines": (EngineTimes(decode=rates),),
        "episodes": EpisodesProfile(stated=StatedEpisodes(answer_tokens=Distribution(mean=ANSWER, sigma=sigma))),
    }
    return Profile(**values | changes)


def run(*, steps: int = 40, max_staleness: int = 0, **backlog) -> SimulatedRun:
    return SimulatedRun(
        steps=steps,
        backlog=BacklogSettings(max_staleness=max_staleness, **{"groups_per_step": 4, "group_size": 2} | backlog),
        generator=GeneratorSettings(on_update="keep"),
    )


def test_synchronous_steps_take_generation_and_training_one_after_the_other():
    forecast = simulate(profile(step_seconds=0.01, train_seconds=1.0), run(max_staleness=0), seeds=2)
    assert forecast.step_seconds.mean == pytest.approx(ANSWER * 0.01 + 1.0)
    assert forecast.staleness_mean.mean == 0
    assert forecast.trainer_idle.mean == pytest.approx(0.5 / 1.5)
    assert forecast.generator_idle.mean == pytest.approx(1.0 / 1.5)


def test_a_slow_trainer_is_never_idle_and_the_step_is_its_time():
    forecast = simulate(profile(step_seconds=0.01, train_seconds=2.0), run(max_staleness=2), seeds=2)
    assert forecast.step_seconds.mean == pytest.approx(2.0)
    assert forecast.trainer_idle.mean == pytest.approx(0.0, abs=1e-9)
    assert forecast.bottleneck == "trainer"


def test_the_same_seed_gives_the_same_forecast_and_another_one_does_not():  # simulator-2
    uneven = profile(sigma=1.0)
    first, again = (simulate(uneven, run(max_staleness=2), seeds=2, first_seed=7) for _ in range(2))
    assert first == again
    assert simulate(uneven, run(max_staleness=2), seeds=2, first_seed=8) != first

"""The simulator against cases whose answer is known without it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import ConfigError
from goaly.generate.settings import GeneratorSettings
from goaly.simulator.forecast import simulate
from goaly.simulator.profile import (
    DecodeRate,
    Distribution,
    EngineTimes,
    EpisodesProfile,
    LoopTimes,
    Profile,
    StatedEpisodes,
    TrainingTimes,
    UpdateTimes,
)
from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.simulation import Simulation
from goaly.simulator.steady_part import SteadyPart

ANSWER = 50
"""Tokens of an answer. If all answers are alike, S + 1 steps' groups end together, and so do the steps that a test
measures: 41 steps have a whole number of such bursts in their steady part."""


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


def test_lag_follows_from_groups_in_flight_and_their_rate():
    """Little's law: groups in flight = rate x time in flight, and a generator-bound run with strict order keeps
    (S + 1) G groups in flight, so that a group is S steps old when it is trained, less the time that it decodes."""
    forecast = simulate(
        profile(step_seconds=0.1, train_seconds=0.01), run(steps=41, max_staleness=3, window=1), seeds=1
    )
    assert forecast.step_seconds.mean == pytest.approx(ANSWER * 0.1 / 4, rel=0.01)  # four steps' groups decode at once
    assert forecast.running.mean == pytest.approx(4 * 4 * 2, rel=0.05)
    assert forecast.generator_idle.mean == pytest.approx(0.0, abs=0.02)


def test_tokens_a_second_are_those_of_the_slower_side():
    busy = profile(step_seconds=0.01, train_seconds=2.0)
    tokens = simulate(busy, run(max_staleness=2), seeds=1).tokens_per_second.mean
    assert tokens == pytest.approx(4 * 2 * ANSWER / 2.0)


def test_a_replica_more_halves_the_time_of_generation_where_rates_do_not_grow():
    flat = {"decode": (DecodeRate(running=1, tokens_per_second=100.0), DecodeRate(running=64, tokens_per_second=100.0))}
    one = profile(train_seconds=0.001, engines=(EngineTimes(**flat),))
    seconds = {}
    for replicas in (1, 2):
        changed = replace(
            run(steps=41, max_staleness=2), generator=GeneratorSettings(on_update="keep", replicas=replicas)
        )
        seconds[replicas] = simulate(one, changed, seeds=1).step_seconds.mean
    assert seconds[1] == pytest.approx(4 * 2 * ANSWER / 100.0, rel=0.02)
    assert seconds[2] == pytest.approx(seconds[1] / 2, rel=0.05)


def test_environments_add_their_waits_to_a_synchronous_step():
    episodes = StatedEpisodes(
        turns=Distribution(mean=2.0),
        answer_tokens=Distribution(mean=ANSWER),
        environment_seconds=Distribution(mean=3.0),
        verifier_seconds=Distribution(mean=0.25),
    )
    forecast = simulate(profile(episodes=EpisodesProfile(stated=episodes)), run(max_staleness=0), seeds=1)
    assert forecast.step_seconds.mean == pytest.approx(2 * ANSWER * 0.01 + 3.0 + 0.25 + 1.0)


def test_a_busy_trainer_and_busy_engines_slow_each_other_down():
    both = profile(train_seconds=2.0, loop=LoopTimes(trainer_slowdown=1.5, engine_slowdown=2.0))
    synchronous = simulate(both, run(max_staleness=0), seeds=1).step_seconds.mean
    assert synchronous == pytest.approx(ANSWER * 0.01 + 2.0)  # never at the same time
    # the engine works for 1 s of each step, and holds the trainer up by a third of it
    assert simulate(both, run(max_staleness=1), seeds=1).step_seconds.mean == pytest.approx(2.0 + 1.0 / 3, rel=0.01)


def test_a_parallelism_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="has no measurement of tp=2"):
        simulate(profile(), replace(run(), generator=GeneratorSettings(tp=2)), seeds=1)


@settings(max_examples=30, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    window=st.integers(1, 9),
    groups_per_step=st.integers(1, 4),
    train_seconds=st.floats(0.0, 20.0),
    sigma=st.floats(0.0, 2.0),
    seed=st.integers(0, 1000),
    on_update=st.sampled_from(["keep", "recompute", "drain"]),
    max_running=st.integers(1, 20),
)
def test_no_token_is_older_than_the_bound_and_no_share_leaves_its_range(
    max_staleness, window, groups_per_step, train_seconds, sigma, seed, on_update, max_running
):
    one = run(steps=12, max_staleness=max_staleness, window=window, groups_per_step=groups_per_step)
    one = replace(one, generator=GeneratorSettings(on_update=on_update, max_running=max_running))
    uneven = profile(train_seconds=train_seconds, sigma=sigma, updates=UpdateTimes(pull_seconds=1.0, apply_seconds=0.5))
    part = SteadyPart.of(one, Simulation(uneven, one, seed).run())
    assert part.max_age <= one.backlog.max_age
    assert 0 <= part.trainer_idle <= 1
    assert 0 <= part.generator_idle <= 1
    assert 0 <= part.staleness_mean <= part.max_age + 1e-9  # a mean of real numbers is rounded
    assert part.step_seconds > 0
    assert part.running <= max_running + 1e-6

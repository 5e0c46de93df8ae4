"""The shipped experiment, in small: what each order does to lengths, idle generation and age."""

import asyncio
from dataclasses import replace

import pytest

from bench.distribution import SETTINGS, Arm, Simulation, measure
from tests import virtual_time

STEPS = 80
SMALL = replace(SETTINGS, groups_per_step=4)
WINDOWED = replace(SMALL, window=16)
COMPLETION = replace(SMALL, order="completion")
WEIGHTED = replace(COMPLETION, length_correction="inverse_propensity")


@pytest.fixture(scope="module")
def arms() -> dict[str, Arm]:
    settings = {"windowed": WINDOWED, "completion": COMPLETION, "weighted": WEIGHTED}
    return {name: measure(name, arm, STEPS) for name, arm in settings.items()}


def test_windowed_order_keeps_both_of_its_bounds_and_converges(arms: dict[str, Arm]) -> None:
    windowed = arms["windowed"]
    for step, found in enumerate(windowed.curve, 1):
        assert found.tv <= (WINDOWED.window - 1) / (step * WINDOWED.groups_per_step) + 1e-12
    assert windowed.age_max <= windowed.max_age == 12  # backlog-3
    assert windowed.at_end.tv < 0.01


def test_completion_order_never_idles_and_pays_with_a_skewed_distribution_and_with_age(arms: dict[str, Arm]) -> None:
    windowed, completion = arms["windowed"], arms["completion"]
    assert completion.idle_share < 0.05 < 0.3 < windowed.idle_share
    assert completion.over_run.w1 > 3 * windowed.over_run.w1
    assert completion.at_end.tv > 3 * windowed.at_end.tv
    assert completion.age_max > windowed.max_age


def test_weights_bring_back_most_of_what_a_run_ends_with_and_little_of_its_beginning(arms: dict[str, Arm]) -> None:
    completion, weighted = arms["completion"], arms["weighted"]
    assert weighted.at_end.w1 < completion.at_end.w1 / 2
    assert weighted.at_end.octave_tv < completion.at_end.octave_tv
    assert completion.over_run.tv / 2 < weighted.over_run.tv < completion.over_run.tv
    assert (weighted.idle_share, weighted.age_max) == (completion.idle_share, completion.age_max)


@pytest.mark.parametrize("settings", [WINDOWED, COMPLETION], ids=["windowed", "completion"])
def test_nothing_finished_is_discarded_and_every_group_is_accounted_for(settings) -> None:
    simulation = Simulation(settings, 20).run()
    counts = simulation.final_counts
    assert counts["trained"] == 20 * settings.groups_per_step
    assert counts["admitted"] == counts["trained"] + counts["rejected"]
    assert simulation.queue.reasons() == {"rejected: the run ended": counts["rejected"]}  # never for its age


def test_virtual_time_ends_where_nothing_can_go_on() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits for another"):
        virtual_time.run(stuck())

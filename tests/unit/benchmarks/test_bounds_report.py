"""What runs at several staleness bounds come to."""

from dataclasses import replace

import pytest

from bench.bounds import Runs, arm, numbers
from bench.recipes import Finished, steps_to_goal

RUN = Finished(
    recipe="bound/0",
    settings="s",
    seed=100,
    pass_at_1_before=0.4,
    pass_at_1=0.9,
    area=0.8,
    seconds=60.0,
    policy_version=160,
    rejected=0,
    failed=0,
)


def test_bounds_are_compared_seed_by_seed_on_the_seeds_that_all_of_them_have() -> None:
    fresh = [replace(RUN, seed=seed, area=area) for seed, area in ((100, 0.8), (101, 0.6), (102, 0.9))]
    stale = [replace(RUN, seed=seed, area=area) for seed, area in ((101, 0.5), (100, 0.7))]
    found = numbers({"0": fresh, "8": stale})
    assert found["0"]["area"].mean == pytest.approx(0.7)
    assert found["8"]["loss of area"].mean == pytest.approx(0.1)
    assert found["8"]["loss of area"].half_width == pytest.approx(0.0, abs=1e-9)
    assert found["8"]["loss of area"].count == 2
    none: Runs = {"0": fresh, "8": []}
    with pytest.raises(SystemExit, match="no seed"):
        numbers(none)


def test_an_arm_has_its_bound_or_its_recipe_and_its_rate_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, tuple[str, ...]]] = []
    monkeypatch.setattr("bench.bounds.recipe", lambda name, file, *more, **_: asked.append((name, file.name, more)))
    arm("8", 3e-4, seed=1, longer=False)
    arm("async_8", 1e-4, seed=1, longer=False)
    arm("0", 3e-4, seed=1, longer=True)
    steps = ("steps=400", "trainer.schedule.total_steps=400")
    assert asked == [
        ("bound/8", "tiny.yaml", ("backlog.max_staleness=8",)),
        ("async_8@0.0001", "async_8.yaml", ("trainer.optimizer.lr=0.0001",)),
        ("bound/0@6e-05", "tiny.yaml", ("backlog.max_staleness=0", *steps, "trainer.optimizer.lr=6e-05")),
    ]


def test_the_goal_is_reached_when_the_mean_of_eight_steps_is() -> None:
    assert steps_to_goal([0.5] * 10 + [1.0] * 10) == 17
    assert steps_to_goal([0.5] * 20) is None

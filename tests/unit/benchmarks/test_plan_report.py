"""The arms of `bench.plan` and its numbers."""

import pytest

from bench.plan import AGENT, ARMS, CALIBRATIONS, PAIRS, Record, numbers, stated


def record(kind: str, name: str, step_seconds: float, staleness: float = 1.0, **more) -> Record:
    return Record(kind=kind, name=name, at=0.0, step_seconds=step_seconds, staleness=staleness, **more)


def test_no_calibration_run_has_load_and_bound_of_an_arm():
    arms = {(one.load, one.staleness) for one in ARMS}
    assert not arms & {(one.load, one.staleness) for one in CALIBRATIONS if one.load in {arm.load for arm in ARMS}}


def test_there_are_as_many_arms_and_pairs_as_the_claim_needs():
    names = [one.name for one in ARMS]
    assert len(names) == len({*names}) >= 24
    assert len(PAIRS) == len({*PAIRS}) == 12
    assert {name for pair in PAIRS for name in pair} <= {*names}


def test_errors_are_shares_of_the_measured_seconds():
    one, other = PAIRS[0]
    found = numbers(
        [
            record("prediction", one, 1.1, low=0.9, high=1.2),
            record("prediction", other, 3.0, staleness=1.5, low=2.9, high=3.1),
            record("run", one, 1.0),
            record("run", other, 2.0),
        ]
    )
    assert found["runs"] == 2
    assert found["median_error"] == pytest.approx((0.1 + 0.5) / 2)
    assert found["worst_error"] == pytest.approx(0.5)
    assert found["staleness_error"] == pytest.approx(0.5)
    assert found["in_interval"] == 1
    assert (found["pairs"], found["pairs_right"]) == (1, 1)


def test_the_stated_load_of_an_agent_has_its_turns_and_waits():
    load = stated(AGENT, 12.0).stated
    assert load is not None
    assert load.turns.mean == 3
    assert 0.5 <= min(load.environment_seconds.samples) < max(load.environment_seconds.samples) <= 3.0

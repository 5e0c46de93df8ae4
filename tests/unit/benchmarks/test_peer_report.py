"""The comparison with a peer: when the goal counts as reached, and what the ratios are taken against."""

import json
import sys
from pathlib import Path

import pytest

import bench.peer
import bench.report
from bench.peer import Result, goal_reached, medians, ratios, result_of, table
from bench.report import Machine
from goaly.base.config import load
from goaly.plan.run_config import RunConfig

MACHINE = Machine(cores=2, load_1m=0.1, busy_cores=0.0, gflops=40.0)


def lines(rewards: list[float], *, begin: float = 100.0, step_seconds: float = 2.0) -> list[dict[str, float]]:
    return [
        {"at": begin, "begin": True},
        *(
            {"at": begin + step_seconds * (index + 1), "reward": reward, "tokens": 10.0}
            for index, reward in enumerate(rewards)
        ),
    ]


def test_the_goal_is_reached_with_the_eighth_step_in_a_row_whose_mean_is_high_enough() -> None:
    assert goal_reached([0.0, *[1.0] * 7]) is None  # a mean of 7/8
    assert goal_reached([0.0, *[1.0] * 8]) == 9
    assert goal_reached([0.9] * 8) == 8
    assert goal_reached([1.0] * 7) is None


def test_a_sides_times_run_from_its_first_step_and_from_its_command() -> None:
    result = result_of("trl", lines([0.0, 0.0, *[1.0] * 8]), 90.0, MACHINE)
    assert (result.goal_step, result.steps) == (10, 10)
    assert (result.learn_seconds, result.total_seconds) == (20.0, 30.0)
    assert result.step_seconds == pytest.approx(2.0)
    assert result.tokens_per_second == pytest.approx(5.0)


def test_ratios_are_taken_against_the_faster_peer_and_are_unknown_where_a_side_did_not_reach_the_goal() -> None:
    def one(side: str, step_seconds: float, learn: float | None) -> Result:
        rewards = [1.0] * 8 if learn is not None else [0.0] * 8
        return result_of(side, lines(rewards, step_seconds=step_seconds), 90.0, MACHINE)

    results = [one("trl", 4.0, 1.0), one("trl ddp", 3.0, 1.0), one("goaly", 1.0, 1.0)]
    found = ratios(medians(results))
    assert found["step_rate"] == pytest.approx(3.0)
    assert found["learn"] == pytest.approx(1 / 3)
    assert found["total"] == pytest.approx((10 + 8) / (10 + 24))
    assert "| goaly | 1.000 |" in table(medians(results))
    assert ratios(medians([one("trl", 4.0, 1.0), one("goaly", 1.0, None)]))["learn"] is None


@pytest.mark.parametrize("steps", [0, 6, 7])
def test_a_side_that_aborts_at_its_end_counts_if_it_has_all_its_steps(
    steps: int, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "".join(json.dumps(line) + "\n" for line in lines([0.5] * steps)) + '{"at": 1'
    program = "import os, sys; open(sys.argv[1], 'w').write(sys.argv[2]); os.abort()"

    def command_of(side: str, config: RunConfig, argv: list[str], folder: Path, python: Path) -> list[str]:
        return [sys.executable, "-c", program, str(folder / "steps.jsonl"), written]

    monkeypatch.setattr(bench.peer, "command_of", command_of)
    config = load(RunConfig, [f"model.path={tiny_model_folder}", "steps=7"], prog="", description="").config
    if steps == 7:
        assert bench.peer.run_side("trl ddp", config, [], Path()).steps == 7
    else:
        with pytest.raises(RuntimeError, match="trl ddp ended with exit code -6"):
            bench.peer.run_side("trl ddp", config, [], Path())


def test_a_result_says_which_share_of_the_cores_the_host_took_away_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.report, "_times", lambda: [0.0] * 7 + [9.0])
    monkeypatch.setattr(bench.report.time, "monotonic", lambda: 104.0)
    machine = Machine(cores=2, load_1m=0.1, busy_cores=0.0, gflops=40.0, _at=100.0, _stolen=7.0)
    assert machine.record() == {"cores": 2, "load_1m": 0.1, "busy_cores": 0.0, "gflops": 40.0, "stolen_cores": 0.5}

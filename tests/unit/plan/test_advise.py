"""Advice from the folder of a run: metrics of made-up runs with known limits, and recorded ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from goaly.base.errors import ConfigError
from goaly.plan.advise import LimitedBy, broken, changes, limit_of, main, report
from goaly.simulator.run_evidence import RunEvidence

pytestmark = pytest.mark.timeout(60)

CONFIG = """
backlog: {groups_per_step: 8, group_size: 4, max_staleness: 2, window: 4}
generator: {replicas: 2, tp: 1, max_running: 64}
trainer: {fsdp: 2}
"""
STEP = 10.0


def run_folder(
    folder: Path,
    *,
    train: float,
    engine: float,
    wait: float,
    steps: int = 40,
    config: str = CONFIG,
    summary: dict[str, Any] | None = None,
    **others: float,
) -> Path:
    """A run whose steps take 10 s, with these shares of them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    lines = []
    for step in range(1, steps + 1):
        busy = 2 * engine * STEP * step
        values = {
            "policy_version": step,
            "time": 1000.0 + STEP * step,
            "step/seconds": STEP,
            "train_seconds": train * STEP,
            "rows_seconds": 0.0,
            "step/wait_seconds": wait * STEP,
            "run/seconds": STEP * step,
            "backlog/running": 20.0,
            "backlog/queued": 4.0,
            "generator/busy_seconds": busy,
            "generator/stall_seconds": 0.0,
            "generator/running_seconds": 30 * busy,
            "generator/cache_seconds": 0.3 * busy,
            "generator/tokens": 1000.0 * step,
            "groups/no_signal_share": 0.1,
            "length/truncated_share": 0.02,
            "age/mean": 1.5,
            "age/max": 3.0,
        }
        lines.append(json.dumps(values | {key.replace("__", "/"): value for key, value in others.items()}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def evidence(folder: Path, **shares: Any) -> RunEvidence:
    return RunEvidence.of(run_folder(folder, **shares), now=1000.0 + STEP * 40)


@pytest.mark.parametrize(
    ("shares", "limit", "setting"),
    [
        ({"train": 0.97, "engine": 0.4, "wait": 0.0}, LimitedBy.TRAINER, "trainer.fsdp=3 generator.replicas=1"),
        ({"train": 0.3, "engine": 0.98, "wait": 0.68}, LimitedBy.GENERATOR, "trainer.fsdp=1 generator.replicas=3"),
        ({"train": 0.4, "engine": 0.5, "wait": 0.1}, LimitedBy.WEIGHTS, "fewer of them in the loop"),
        ({"train": 0.4, "engine": 0.6, "wait": 0.6, "backlog__queued": 9.0}, LimitedBy.WINDOW, "backlog.window=8"),
        ({"train": 0.4, "engine": 0.2, "wait": 0.6}, LimitedBy.EPISODES, "backlog.max_staleness=4"),
        ({"train": 0.4, "engine": 0.75, "wait": 0.6}, LimitedBy.STALENESS, "backlog.max_staleness=4"),
    ],
)
def test_each_limit_is_found_and_gets_its_own_advice(tmp_path: Path, shares, limit: LimitedBy, setting: str):
    run = evidence(tmp_path, **shares)
    assert limit_of(run) is limit
    found = {change.settings: change.seconds for change in changes(run, limit)}
    assert setting in found
    assert max(found.values()) < STEP


def test_a_better_split_of_the_same_ranks_takes_as_long_as_its_slower_side(tmp_path: Path):
    run = evidence(tmp_path, train=0.3, engine=0.98, wait=0.7)
    moved = next(one for one in changes(run, LimitedBy.GENERATOR) if "trainer.fsdp" in one.settings)
    assert moved.seconds == pytest.approx(max(2 * 3.0 / 1, 2 * 9.8 / 3))


def test_a_synchronous_run_is_told_to_be_one_step_off(tmp_path: Path):
    config = CONFIG.replace("max_staleness: 2", "max_staleness: 0")
    run = evidence(tmp_path, train=0.45, engine=0.5, wait=0.55, config=config)
    assert limit_of(run) is LimitedBy.STALENESS
    best = changes(run, LimitedBy.STALENESS)[0]
    assert (best.settings, best.seconds) == ("backlog.max_staleness=1", pytest.approx(5.0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"groups__no_signal_share": 0.5}, "50 % of the groups have no signal"),
        ({"length__truncated_share": 0.25}, "25 % of the answers are truncated"),
        ({"reward__verifier_timeouts": 4.0}, "verifier was late"),
        ({"agents__sessions_timed_out": 4.0}, "exceeded their time limit"),
        ({"summary": {"status": "failed"}}, "the run failed"),
        ({"summary": {"status": "finished", "trained": 90, "failed": 10}}, "10 % of the groups failed"),
    ],
)
def test_nothing_is_said_about_tuning_while_something_is_broken(tmp_path: Path, values, words: str):
    run = evidence(tmp_path, train=0.97, engine=0.4, wait=0.0, **values)
    assert any(words in line for line in broken(run))
    text = report(run)
    assert words in text
    assert "limited by" not in text
    assert "trainer.fsdp" not in text


def test_a_run_that_stands_still_is_a_stall_and_a_finished_one_is_none(tmp_path: Path):
    folder = run_folder(tmp_path, train=0.97, engine=0.4, wait=0.0)
    assert list(broken(RunEvidence.of(folder, now=1400.0))) == []
    assert "a stall: 3600 s since the newest step" in next(broken(RunEvidence.of(folder, now=1400.0 + 3600)))
    run_folder(tmp_path, train=0.97, engine=0.4, wait=0.0, summary={"status": "finished"})
    assert list(broken(RunEvidence.of(folder, now=1400.0 + 3600))) == []


def test_a_replaced_generator_and_a_resumed_run_do_not_count_as_work_undone(tmp_path: Path):
    folder = run_folder(tmp_path, train=0.5, engine=0.5, wait=0.5)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[20:]:
        line["generator/busy_seconds"] -= 150.0  # a replica was replaced
    for line in lines[30:]:
        line["run/seconds"] -= 290.0  # resumed
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunEvidence.of(folder, now=1400.0)
    assert run.step_seconds == pytest.approx(10.0)
    assert run.engine_seconds == pytest.approx(5.0)


def test_a_recorded_run_of_a_coding_agent_was_limited_by_its_trainer():
    """Two cores, one each for the trainer and the engine; an older run, without some of the metrics."""
    folder = Path(__file__).parent / "recorded_run"
    run = RunEvidence.of(folder, now=1795763375.0)
    assert limit_of(run) is LimitedBy.TRAINER
    text = report(run)
    assert "trainer    works for 99 % of a step" in text
    assert "trainer.fsdp=2" in text
    assert "requests at once" not in text  # it was not measured


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "must be the folder of a run, which has a config.yaml"),
        (lambda folder: (folder / "config.yaml").write_text("steps: 1\n"), "must be the config of an RL run"),
        (lambda folder: (folder / "config.yaml").write_text(CONFIG), "0 steps can be compared, must be at least 4"),
        (lambda folder: (folder / "config.yaml").write_text("a: [1\n"), "config.yaml"),
    ],
)
def test_a_folder_that_is_no_run_gets_one_clear_error(tmp_path: Path, make, words: str, capsys):
    make(tmp_path)
    with pytest.raises(ConfigError, match=words):
        RunEvidence.of(tmp_path)
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert words in capsys.readouterr().err

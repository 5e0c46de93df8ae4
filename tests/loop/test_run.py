"""Whole runs, as a user starts them: what they leave behind, and how they end when something dies."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import START_SECONDS, LaunchedRun, gone_within, orphaned_memory, orphaned_within
from wandb_file import history, offline_files

from goaly.journal.__main__ import main as journal

pytestmark = pytest.mark.timeout(900)  # what hangs is found by the waits' own limits

Launch = Callable[..., LaunchedRun]

STEPS = 60

TWO_SOURCES = (
    "prompts.task=null",
    "prompts.sources=[{name: short, task: arithmetic, arithmetic: {max_digits: 3}, weight: 3}, "
    "{name: long, task: arithmetic}]",
    "prompts.curriculum={}",
)


def test_a_run_survives_the_death_of_a_generator_and_leaves_a_complete_folder(launch: Launch, tmp_path: Path) -> None:
    before = orphaned_memory()
    go = tmp_path / "run0.go"
    os.mkfifo(go)
    overrides = ["loss.kl_coef=0.01", "advantages.kl_coef=0.01", "loss.name=tests.loop.own_loss:squared"]
    overrides += ["generator.replicas=2", "backlog.max_staleness=2", "reference.refresh_every=2", *TWO_SOURCES]
    overrides += ["evaluation.every=20", "save.every=20", "save.keep=2", "save.best=true"]
    overrides += ["telemetry.wandb.mode=offline"]
    run = launch(f"steps={STEPS}", *overrides, module="tests.loop.waiting_for_go")
    run.wait_for_steps(2)
    children = run.processes()
    run.kill("generator-0")
    run.wait_for_text("generator 0 serves again", START_SECONDS)
    go.write_bytes(b"go")  # the run's last steps have both replicas
    assert run.text().count("generator 0 died") == 1
    assert run.wait(START_SECONDS) == 0, run.text()

    summary = run.summary()
    assert summary["policy_version"] == STEPS
    assert summary["admitted"] == summary["trained"] == 2 * STEPS  # nobody's request was lost, and nothing failed
    assert (summary["rejected"], summary["failed"], summary["reasons"]) == (0, 0, {})
    assert run.text().splitlines()[-1].startswith(f"held-out pass@1: {summary['pass_at_1_before']:.2f} -> ")

    steps = run.lines("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["age/max"] <= 2 + 1 for step in steps)
    assert all({"kl_reference", "advantage_square"} <= step.keys() for step in steps)
    assert [step["reference/version"] for step in steps] == [batch - batch % 2 for batch in range(STEPS)]
    assert all(step["mix/short"] + step["mix/long"] == pytest.approx(1) for step in steps)
    assert steps[-1]["distribution/tv"] <= 1 / (2 * steps[-1]["distribution/known_step"])  # a window of 2
    assert steps[-1]["distribution/source_total/short"] == pytest.approx(0.75, abs=0.05)
    assert journal(["export", str(run.folder)]) == 0
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == 2 * STEPS * 4
    assert {"prompt", "response", "reward", "versions"} <= set(rollouts[0])

    events = json.loads((run.folder / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"generation", "reward", "queue_wait", "train", "stage", "pull", "apply"} <= names

    assert (run.folder / "config.yaml").exists()
    assert list((run.folder / "tensorboard").iterdir())
    assert (run.folder / "policy" / "model.safetensors").exists()
    assert_evaluated_and_saved_every_20_steps(run)
    assert [row for row in history(*offline_files(run.folder)) if "loss" in row] == [
        {name: value for name, value in step.items() if name != "time"} for step in steps
    ]
    assert gone_within(children) == []
    assert orphaned_within(before) == set()


def assert_evaluated_and_saved_every_20_steps(run: LaunchedRun) -> None:
    """Check the evaluations beside training, and the policies that the run kept, on its disk."""
    evaluations = run.lines("evaluations.jsonl")
    evaluated = [line["policy_version"] for line in evaluations]
    assert (evaluated[0], evaluated.count(0), max(evaluated)) == (0, 1, STEPS)
    assert set(evaluated) <= {0, 20, 40, 60}
    assert len(set(evaluated) & {20, 40, 60}) + run.lines("metrics.jsonl")[-1]["evaluation/skipped"] >= 3
    policies = run.folder / "policies"
    assert {folder.name for folder in policies.iterdir()} == {"000040", "000060", "best"}
    assert (policies / "000060" / "model.safetensors").read_bytes() == (
        run.folder / "policy" / "model.safetensors"
    ).read_bytes()
    best = json.loads((policies / "best" / "policy_score.json").read_text())
    scores = [(line["policy_version"], line["evaluation/held_out/pass@1"]) for line in evaluations]
    assert (best["policy_version"], best["pass@1"]) in scores
    assert (policies / "best" / "model.safetensors").stat().st_size > 0


def test_a_killed_trainer_ends_the_run_with_an_error_that_names_it(launch: Launch) -> None:
    run = launch("steps=10000")
    run.wait_for_steps(1)
    children = run.processes()
    run.kill("trainer")
    assert run.wait() == 1
    assert "trainer died" in run.text()  # run-12
    assert "Traceback" not in run.text()
    assert run.summary()["status"] == "failed"
    assert gone_within(children) == []


def test_bad_settings_are_told_all_at_once_and_nothing_is_spawned(launch: Launch, tmp_path: Path) -> None:
    run = launch("backlog.grops_per_step=2", "trainer.tp=0", "sampling.temperature=hot", "evaluation.prompts=0")
    assert run.wait() == 2
    text = run.text()
    for key in ("backlog.grops_per_step", "trainer.tp=0", "sampling.temperature=hot", "evaluation.prompts=0"):
        assert key in text
    assert "did you mean backlog.groups_per_step" in text
    assert not run.folder.exists()

"""Runs that are told to stop, and one that goes on after that in another shape."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched import (
    REWARDED,
    START_SECONDS,
    LaunchedRun,
    assert_whole,
    gone_within,
    orphaned_memory,
    orphaned_within,
    replayed,
)

from goaly import replay

pytestmark = pytest.mark.timeout(900)

Launch = Callable[..., LaunchedRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A run after SIGTERM to all of its processes, as it was then."""

    run: LaunchedRun
    steps: int
    checkpoints: list[str]


@pytest.fixture(scope="module")
def stopped(launch_shared: Launch) -> Stopped:
    settings = ("checkpoint.every=null", "backlog.max_staleness=2", "loss.kl_coef=0.01", REWARDED)
    run = launch_shared("steps=1000", *settings)
    run.wait_for_steps(3)
    for pid in (*run.processes(), run.process.pid):  # as schedulers send it
        os.kill(pid, signal.SIGTERM)
    assert run.wait() == 130, run.text()
    assert " died" not in run.text()  # run-8
    checkpoints = [checkpoint.name for checkpoint in (run.folder / "checkpoints").iterdir()]
    return Stopped(run=run, steps=run.steps(), checkpoints=checkpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """The stopped run, resumed in another shape and finished; in between, a follower of its only replica was killed."""

    run: LaunchedRun
    steps: int
    replica: list[int]
    """The replica's processes."""
    survivors: list[int]
    """Those that did not die with the follower."""


@pytest.fixture(scope="module")
def reshaped(launch_shared: Launch, stopped: Stopped) -> Reshaped:
    steps = stopped.steps + 10
    shape = ("trainer.fsdp=2", "rollout.workers=2", "generator.tp=2")
    run = launch_shared(f"steps={steps}", *shape, resume=stopped.run)
    run.wait_for_steps(stopped.steps + 2)
    replica = run.spawned("generator-0")
    run.kill("generator-0.1")
    run.wait_for_text("generator 0 serves again", START_SECONDS)
    survivors = gone_within(replica)
    assert run.wait(START_SECONDS) == 0, run.text()
    return Reshaped(run=run, steps=steps, replica=replica, survivors=survivors)


def test_a_run_that_is_told_to_stop_leaves_a_checkpoint_of_its_last_step(stopped: Stopped) -> None:  # run-3
    (checkpoint,) = stopped.checkpoints
    assert int(checkpoint) == stopped.steps >= 3


def test_what_a_resumed_run_may_not_change_is_refused_and_nothing_is_lost(
    launch: Launch, stopped: Stopped, tmp_path: Path
) -> None:
    folder = stopped.run.folder
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    refused = launch("backlog.group_size=8", "loss.name=gspo", "steps=1001", resume=stopped.run)
    assert refused.wait() == 2
    assert "backlog.group_size=8: must stay 4 in a resumed run, because the logged groups" in refused.text()
    assert "loss.name=gspo: must stay" in refused.text()
    assert "(override)" in refused.text()
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    nowhere = LaunchedRun(tmp_path / "nowhere", tmp_path, resume=True)
    assert nowhere.wait() == 2
    assert f"--resume={tmp_path / 'nowhere'}: must be the folder of a run" in nowhere.text()


def test_a_stopped_run_goes_on_in_another_shape(stopped: Stopped, reshaped: Reshaped) -> None:  # run-3
    assert f"resumed at policy version {stopped.steps}" in reshaped.run.text()
    assert_whole(reshaped.run, reshaped.steps)
    assert all(step["grad_norm"] > 0 for step in reshaped.run.lines("metrics.jsonl"))


def test_the_death_of_a_follower_is_the_death_of_its_replica_and_costs_no_request(reshaped: Reshaped) -> None:
    assert len(reshaped.replica) == 2
    assert reshaped.survivors == []
    summary = reshaped.run.summary()
    trained = 2 * reshaped.steps
    assert (summary["policy_version"], summary["admitted"], summary["trained"]) == (reshaped.steps, trained, trained)


def test_only_steps_with_the_first_trainer_settings_can_be_trained_again(
    stopped: Stopped, reshaped: Reshaped, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(reshaped.run.folder), "--check"]) == 2
    latest = f"must be at most {stopped.steps}, from where the run went on with other trainer settings"
    assert latest in capsys.readouterr().err
    checked = replayed(reshaped.run, "--check", "--to", str(stopped.steps))
    assert checked.returncode == 0, checked.stderr
    assert f"{stopped.steps} digests are as recorded" in checked.stdout


def test_ctrl_c_stops_a_run_cleanly(launch: Launch) -> None:
    before = orphaned_memory()
    run = launch("steps=10000")
    run.wait_for_steps(2)
    children = run.processes()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    summary = run.summary()
    assert summary["status"] == "interrupted"
    assert summary["admitted"] == summary["trained"] + summary["rejected"] + summary["failed"]  # run-2
    assert (run.folder / "trace.json").exists()
    assert gone_within(children) == []
    assert orphaned_within(before) == set()

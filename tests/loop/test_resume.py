"""Runs that are killed or told to stop, and resumed."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import ROOT, START_SECONDS, LaunchedRun, gone_within, orphaned_memory, orphaned_within
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(900)

Launch = Callable[..., LaunchedRun]

STEPS = 8
REPEATABLE = (
    "rollout.repeatable=true",
    "backlog.max_staleness=0",
    "generator.max_running=1",
    "generator.prefix_caching=false",
)
"""Answers do not depend on timing, to the last bit."""
REWARDED = "reward.verifier=tests.loop.verifiers:share_of_digits"
"""Rewards that differ, so that every step changes the policy."""


def assert_whole(run: LaunchedRun, steps: int = STEPS) -> None:
    """Every step was recorded once, and every group was trained once."""
    assert [step["policy_version"] for step in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    summary = run.summary()
    assert summary["policy_version"] == steps
    assert summary["admitted"] == summary["trained"] == 2 * steps
    assert (summary["rejected"], summary["failed"], summary["reasons"]) == (0, 0, {})


def policy(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "policy" / "model.safetensors")


def replay(run: LaunchedRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goaly.replay", str(run.folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False, cwd=ROOT)


def test_a_killed_and_resumed_run_equals_one_that_was_not_killed_and_can_be_trained_again_to_the_last_bit(
    launch: Launch, tmp_path: Path
) -> None:
    settings = (f"steps={STEPS}", "checkpoint.every=3", REWARDED, *REPEATABLE)
    whole = launch(*settings, app="ppo")
    assert whole.wait(START_SECONDS) == 0, whole.text()

    before = orphaned_memory()
    killed = launch(*settings, app="ppo")
    killed.wait_for_steps(5)
    processes = list(killed.processes())
    killed.process.kill()
    assert gone_within(processes) == []
    resumed = launch(resume=killed, app="ppo")
    assert resumed.wait(START_SECONDS) == 0, resumed.text()
    assert "resumed at policy version 3" in resumed.text()
    assert_whole(resumed)
    assert "when it was made first" not in resumed.text()  # the versions made again have the same digests
    assert all(step["grad_norm"] > 0 for step in resumed.lines("metrics.jsonl"))
    for name, tensor in policy(whole.folder).items():
        assert torch.equal(tensor, policy(resumed.folder)[name]), name

    checked = replay(resumed, "--check")
    assert checked.returncode == 0, checked.stderr
    assert f"{STEPS} digests are as recorded" in checked.stdout
    other = replay(resumed, "--into", str(tmp_path / "other"), "trainer.optimizer.lr=1e-2")
    assert other.returncode == 0, other.stderr
    assert len((tmp_path / "other" / "metrics.jsonl").read_text().splitlines()) == STEPS
    for name, tensor in policy(tmp_path / "other").items():
        assert not torch.equal(tensor, policy(resumed.folder)[name]), name
    assert orphaned_within(before) == set()


def test_a_run_that_is_told_to_stop_leaves_a_checkpoint_and_goes_on_in_another_shape(launch: Launch) -> None:  # RN-4
    run = launch("steps=1000", "checkpoint.every=null", "backlog.max_staleness=2", "loss.kl_coef=0.01")
    run.wait_for_steps(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.text()
    done = run.steps()
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert int(checkpoint.name) == done >= 3
    resumed = launch(f"steps={done + 3}", "trainer.fsdp=2", "rollout.workers=2", resume=run)
    assert resumed.wait(START_SECONDS) == 0, resumed.text()
    assert f"resumed at policy version {done}" in resumed.text()
    assert_whole(resumed, done + 3)
    checked = replay(resumed, "--check")
    assert checked.returncode == 2
    assert f"must be at most {done}, from where the run went on with other trainer settings" in checked.stderr
    checked = replay(resumed, "--check", "--to", str(done))
    assert checked.returncode == 0, checked.stderr
    assert f"{done} digests are as recorded" in checked.stdout


def test_what_a_resumed_run_may_not_change_is_refused_and_nothing_is_lost(launch: Launch, tmp_path: Path) -> None:
    run = launch("steps=1", "evaluation.prompts=1")
    assert run.wait(START_SECONDS) == 0, run.text()
    before = {path: path.read_bytes() for path in sorted(run.folder.rglob("*")) if path.is_file()}
    refused = launch("backlog.group_size=8", "loss.name=gspo", "steps=2", resume=run)
    assert refused.wait() == 2
    assert "backlog.group_size=8: must stay 4 in a resumed run, because the logged groups" in refused.text()
    assert "loss.name=gspo: must stay" in refused.text()
    assert "(override)" in refused.text()
    assert {path: path.read_bytes() for path in sorted(run.folder.rglob("*")) if path.is_file()} == before
    nowhere = LaunchedRun(tmp_path / "nowhere", tmp_path, resume=True)
    assert nowhere.wait() == 2
    assert f"--resume={tmp_path / 'nowhere'}: must be the folder of a run" in nowhere.text()

"""Runs that are killed, and resumed. Several tests look at one run, because each start of a run takes long."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
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
PPO = (
    f"steps={STEPS}",
    "checkpoint.every=3",
    "critic.epochs=2",
    "critic.value_clip=0.5",
    "trainer.minibatches=2",
    "loss.proximal=trainer",
    "evaluation.prompts=2",
    REWARDED,
    *REPEATABLE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run of PPO that was ended, and what that left of it."""

    run: LaunchedRun
    processes: list[int]
    """Those that it had."""
    survivors: list[int]
    """Those that were still there after a while."""


@pytest.fixture(scope="module")
def whole(launch_shared: Launch) -> Ended:
    """A run that trained all steps without interruption, and was ended by a second Ctrl-C during the evaluation after
    them."""
    run = launch_shared(*PPO, app="ppo", module="tests.loop.hanging_evaluation")
    run.wait_for_text("the final evaluation hangs", START_SECONDS)
    processes = run.processes()
    run.process.send_signal(signal.SIGINT)
    run.wait_for_text("once more stops at once")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    return Ended(run=run, processes=processes, survivors=gone_within(processes))


@pytest.fixture(scope="module")
def memory_before() -> set[str]:
    """What was orphaned in /dev/shm before the run that is killed."""
    return orphaned_memory()


@pytest.fixture(scope="module")
def killed(launch_shared: Launch, memory_before: set[str]) -> Ended:
    """A run with the same settings whose controller was killed after some steps."""
    run = launch_shared(*PPO, app="ppo")
    run.wait_for_steps(5)
    processes = run.processes()
    run.process.kill()
    return Ended(run=run, processes=processes, survivors=gone_within(processes))


@pytest.fixture(scope="module")
def resumed(launch_shared: Launch, killed: Ended) -> LaunchedRun:
    """The killed run, resumed and finished."""
    run = launch_shared(resume=killed.run, app="ppo")
    assert run.wait(START_SECONDS) == 0, run.text()
    return run


def policy(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "policy" / "model.safetensors")


def test_a_second_ctrl_c_stops_a_run_without_its_closing(whole: Ended) -> None:
    assert not (whole.run.folder / "summary.json").exists()
    assert whole.survivors == []


def test_nothing_outlives_a_controller_that_is_killed(killed: Ended, memory_before: set[str]) -> None:
    assert len(killed.processes) >= 5
    assert killed.survivors == []  # run-8
    assert orphaned_within(memory_before) == set()


def test_a_killed_and_resumed_run_equals_one_that_was_not_killed(whole: Ended, resumed: LaunchedRun) -> None:
    assert "resumed at policy version 3" in resumed.text()
    assert_whole(resumed, STEPS)
    assert "when it was made first" not in resumed.text()  # the versions made again have the same digests
    assert all(step["grad_norm"] > 0 for step in resumed.lines("metrics.jsonl"))
    for name, tensor in policy(whole.run.folder).items():
        assert torch.equal(tensor, policy(resumed.folder)[name]), name


def test_a_run_trains_policy_and_critic_on_every_batch(resumed: LaunchedRun) -> None:
    assert "held-out pass@1" in resumed.text().splitlines()[-1]
    steps = resumed.lines("metrics.jsonl")
    assert [step["policy_version"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["critic/value"] == 0  # it began with a head of 0,
    assert all(step["critic/value"] != 0 for step in steps[1:])  # and learned from each batch
    reported = {"loss", "critic/loss", "critic/explained_variance", "critic/clip_fraction", "critic/grad_norm"}
    assert all(reported <= step.keys() for step in steps)
    summary = resumed.summary()
    assert summary["admitted"] == summary["trained"] == 2 * STEPS
    events = (resumed.folder / "trace.json").read_text()
    assert all(f'"{name}"' in events for name in ("values", "train_critic", "train"))


def test_a_run_can_be_trained_again_to_the_last_bit_or_with_other_settings(
    resumed: LaunchedRun, memory_before: set[str], tmp_path: Path
) -> None:
    checked = replayed(resumed, "--check")
    assert checked.returncode == 0, checked.stderr
    assert f"{STEPS} digests are as recorded" in checked.stdout
    other = replayed(resumed, "--into", str(tmp_path / "other"), "trainer.optimizer.lr=1e-2")
    assert other.returncode == 0, other.stderr
    assert len((tmp_path / "other" / "metrics.jsonl").read_text().splitlines()) == STEPS
    for name, tensor in policy(tmp_path / "other").items():
        assert not torch.equal(tensor, policy(resumed.folder)[name]), name
    assert orphaned_within(memory_before) == set()

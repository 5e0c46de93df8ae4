"""A run evaluates by itself while it trains: when, of which version, and how such an evaluation ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from goaly.base.config import load
from goaly.base.errors import RunFailed
from goaly.plan.run_config import RunConfig, SaveSettings
from goaly.rollout.evaluation_settings import EvaluationSettings
from goaly.rollout.running_episodes import EvaluationFailed
from goaly.run.run import Run
from goaly.run.start import started

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def config(tiny_model_folder: Path) -> RunConfig:
    """A run of nine steps that evaluates two prompts after every second one and shows nothing."""
    argv = [f"model.path={tiny_model_folder}", "steps=9", "evaluation.every=2", "evaluation.prompts=2"]
    argv.append("telemetry={tensorboard: false, progress: off, trace: false}")
    return load(RunConfig, argv, prog="test", description="").config


class Rollouts:
    """Rollouts that pass every prompt from version 4 on, when they may answer."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[int] = []
        self.cancelled = 0
        self.error: Exception | None = None

    async def rewards(self, prompts: Any, samples: int, sampling: Any, policy_version: int) -> list[list[float]]:
        self.asked.append(policy_version)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [[float(policy_version >= 4)] * samples for _ in prompts]


def write_policy(folder: Path, policy_version: int) -> None:
    """A folder with the version in it."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(str(policy_version))


class Trainer:
    """A trainer whose policy is its version."""

    def __init__(self) -> None:
        self.start_version = self.policy_version = 0
        self.has_unsaved = False
        self.saves: list[tuple[int, str]] = []

    async def save_version(self, policy_version: int, folder: Path) -> None:
        """Write the folder."""
        assert policy_version == self.policy_version
        self.saves.append((policy_version, folder.name))
        write_policy(folder, policy_version)

    async def save_newest(self) -> None:
        """The final policy."""
        self.saves.append((self.policy_version, "policy"))


class NoHosts:
    """Hosts of a run that starts no process."""

    def __init__(self, *arguments: Any, **options: Any):
        """Takes what hosts take."""

    async def stop_all(self) -> None:
        """There is nothing to stop."""


@asynccontextmanager
async def run_of(config: RunConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """A started run whose actors are fakes."""

    async def counts() -> dict[str, int]:
        return {"running": 0, "queued": 0}

    async def stats() -> list[Any]:
        return []

    async def bring_up(run: Run, *_: Any) -> None:
        async def supervise() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                run.generators.evaluations_at_end = len(run.evaluations)

        run.trainer = Trainer()
        run.rollouts = Rollouts()
        run.backlog = SimpleNamespace(
            counts=counts, waited_seconds=0.0, end=lambda: None, final_counts={}, final_reasons={}
        )
        run.checkpoints = SimpleNamespace(after_step=AsyncMock(), finish=AsyncMock())
        run.generators = SimpleNamespace(stats=stats, supervise=supervise)

    monkeypatch.setattr("goaly.run.start._bring_up", bring_up)
    monkeypatch.setattr("goaly.run.start.Hosts", NoHosts)
    async with started(config, None, run_dir) as run:  # type: ignore[arg-type]
        yield run


async def train(run: Run, upto: int) -> None:
    """Train and report steps until this version. An evaluation that may answer ends before the next step."""
    while run.trainer.policy_version < upto:
        batch = SimpleNamespace(id=run.trainer.policy_version, passes={}, metrics={}, tokens=1)
        run.trainer.policy_version += 1
        await run.report(batch, {})
        await asyncio.sleep(0)
        if run.rollouts.may_answer.is_set():
            await run.periodic.ended()


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file of the run folder."""
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def evaluated(run_dir: Path) -> list[tuple[int, float, float | None]]:
    """Version, pass@1 and newest version of each recorded evaluation."""
    keys = ("policy_version", "evaluation/held_out/pass@1", "evaluation/newest_version")
    return [tuple(line.get(key) for key in keys) for line in lines(run_dir, "evaluations.jsonl")]


async def test_an_evaluation_starts_every_so_many_versions_and_is_recorded_with_its_version(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_of(config, tmp_path, monkeypatch) as run:
        await run.evaluate()
        await train(run, 5)
    assert evaluated(tmp_path) == [(0, 0.0, None), (2, 0.0, None), (4, 1.0, None)]
    assert [line["evaluation/skipped"] for line in lines(tmp_path, "metrics.jsonl")] == [0.0] * 5
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["pass_at_1_before"], summary["pass_at_1_after"]) == ("finished", 0.0, 1.0)


async def test_a_script_alone_decides_where_no_period_is_set(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, evaluation=EvaluationSettings(prompts=2))
    async with run_of(config, tmp_path, monkeypatch) as run:
        await train(run, 4)
    assert evaluated(tmp_path) == []
    assert "evaluation/skipped" not in lines(tmp_path, "metrics.jsonl")[0]


async def test_training_goes_on_while_a_slow_evaluation_runs_and_those_due_meanwhile_are_skipped(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with run_of(config, tmp_path, monkeypatch) as run:
        run.rollouts.may_answer.clear()
        await train(run, 7)
        assert run.rollouts.asked == [2]
        run.rollouts.may_answer.set()
        await run.periodic.ended()
        await train(run, 8)
    assert evaluated(tmp_path) == [(2, 0.0, 7), (8, 1.0, None)]
    assert [line["evaluation/skipped"] for line in lines(tmp_path, "metrics.jsonl")] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [message for message in caplog.messages if "skipped" in message] == [
        f"the evaluation of policy version {version} is skipped, because that of version 2 is still running"
        for version in (4, 6)
    ]


async def test_the_end_of_a_script_waits_for_the_evaluation_and_the_newest_version_has_the_last_word(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_of(config, tmp_path, monkeypatch) as run:
        slow = run.rollouts
        slow.may_answer.clear()
        await train(run, 5)
        run.rollouts = Rollouts()
        await run.evaluate()  # of version 5, while that of version 2 is still running
        asyncio.get_running_loop().call_later(0.05, slow.may_answer.set)
    assert evaluated(tmp_path) == [(5, 1.0, None), (2, 0.0, 5)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["pass_at_1_after"]) == ("finished", 1.0)
    assert [one["policy_version"] for one in summary["evaluations"]] == [5, 2]
    assert summary["evaluations"][1]["newest_version"] == 5
    assert run.trainer.saves == [(5, "policy")]  # before the wait
    assert run.generators.evaluations_at_end == 2  # they are supervised while it answers


async def test_a_script_that_asks_for_what_is_being_evaluated_shares_its_result(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_of(config, tmp_path, monkeypatch) as run:
        run.rollouts.may_answer.clear()
        await train(run, 2)
        shared = asyncio.create_task(run.evaluate())
        own = asyncio.create_task(run.evaluate(["held_out"]))
        await asyncio.sleep(0)
        run.rollouts.may_answer.set()
        assert (await shared).policy_version == (await own).policy_version == 2
    assert evaluated(tmp_path) == [(2, 0.0, None)] * 2


async def test_an_evaluation_that_fails_ends_the_run_with_an_error_that_names_it(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script() -> None:
        async with run_of(config, tmp_path, monkeypatch) as run:
            run.rollouts.error = RunFailed("rollout.evaluate failed: ValueError: no such tool")
            await train(run, 9)

    with pytest.raises(ExceptionGroup) as group:
        await script()
    (error,) = group.value.exceptions
    assert isinstance(error, RunFailed)
    expected = "the evaluation of policy version 2 failed: rollout.evaluate failed: ValueError: no such tool"
    assert str(error) == expected
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


async def test_an_evaluation_without_a_result_ends_nothing_else_and_is_counted(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, save=SaveSettings(best=True))
    async with run_of(config, tmp_path, monkeypatch) as run:
        run.rollouts.error = EvaluationFailed("16 episodes failed in a row; the last: no such tool")
        await run.evaluate()
        await train(run, 3)
        run.rollouts.error = None
        await train(run, 5)
        run.rollouts.error = EvaluationFailed("16 episodes failed in a row; the last: no such tool")
        assert (await run.evaluate()).results == {}  # that after the last step
    assert evaluated(tmp_path) == [(4, 1.0, None)]
    assert [line.get("evaluation/failed") for line in lines(tmp_path, "metrics.jsonl")] == [1.0, 1.0, 2.0, 2.0, 2.0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["failed_evaluations"], len(summary["evaluations"])) == ("finished", 3, 1)
    told = [text for text in caplog.messages if "the last: no such tool" in text]
    assert [text.partition(" failed on held_out")[0] for text in told] == [
        f"the evaluation of policy version {version}" for version in (0, 2, 5)
    ]
    assert {path.name for path in (tmp_path / "policies").iterdir()} == {"best"}


@pytest.mark.parametrize("during", ["training", "the wait for it"])
async def test_an_interrupt_cancels_it(
    during: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, trained = [], asyncio.Event()

    async def script() -> None:
        async with run_of(config, tmp_path, monkeypatch) as run:
            runs.append(run)
            run.rollouts.may_answer.clear()
            await train(run, 3)
            trained.set()
            if during == "training":
                await asyncio.Event().wait()

    main = asyncio.create_task(script())
    await trained.wait()
    await asyncio.sleep(0.05)
    main.cancel()
    await asyncio.wait([main])
    assert main.cancelled()
    assert (runs[0].rollouts.asked, runs[0].rollouts.cancelled) == ([2], 1)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


async def test_the_candidate_for_the_best_policy_is_saved_before_training_changes_it_and_judged_by_its_own_evaluation(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, save=SaveSettings(every=3, best=True))
    async with run_of(config, tmp_path, monkeypatch) as run:
        run.rollouts.may_answer.clear()
        await train(run, 3)
        assert not (tmp_path / "policies" / "best").exists()
        run.rollouts.may_answer.set()
        await run.periodic.ended()
        await train(run, 5)
        run.rollouts.may_answer.clear()
        await train(run, 7)  # that of version 6 runs until the script's end
        asyncio.get_running_loop().call_later(0.05, run.rollouts.may_answer.set)
    policies = tmp_path / "policies"
    assert {path.name for path in policies.iterdir()} == {"000003", "000006", "best"}
    assert (policies / "best" / "model.safetensors").read_text() == "4"
    score = json.loads((policies / "best" / "policy_score.json").read_text())
    assert score == {"policy_version": 4, "set": "held_out", "pass@1": 1.0}
    saves = [(2, ".candidate"), (3, "000003"), (4, ".candidate"), (6, "000006"), (7, "policy")]
    assert run.trainer.saves == saves

"""A trained policy is on disk before anything else can fail (run-1), on a trainer of fakes."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from goaly.base.config import load
from goaly.base.errors import RunFailed
from goaly.plan.run_config import RunConfig
from goaly.run.replaceable_actors import ReplaceableActors
from goaly.run.start import _save_policy, started
from goaly.run.trainer_stage import TrainerStage

pytestmark = pytest.mark.timeout(30)


class Endpoint:
    """An endpoint of one rank: writes down that it was called, then does what it is told to."""

    def __init__(self, name: str, calls: list[Any], answer: Any):
        self._name, self._calls, self._answer = name, calls, answer

    def stream(self, *arguments: Any) -> Iterator[Awaitable[Any]]:
        """The rank's answer."""
        self._calls.append((self._name, *arguments))
        return iter([self._answer(*arguments)])


class Ranks:
    """A trainer's ranks; `saved` lets a save end, `broken` fails every step."""

    def __init__(self, start: int = 0):
        self.calls: list[Any] = []
        self.saved = asyncio.Event()
        self.saved.set()
        self.broken = False
        version = start

        async def started(checkpoint: Path | None) -> int:
            return version

        async def stepped(batch: Any) -> dict[str, float]:
            nonlocal version
            if self.broken:
                raise RunFailed("the loss is NaN")
            version = batch.id + 1
            return {}

        async def published() -> int:
            return version

        async def digest() -> str:
            return f"digest of {version}"

        async def saved(folder: Path) -> None:
            await self.saved.wait()

        answers = {"start": started, "step": stepped, "publish": published, "digest": digest, "save": saved}
        for name, answer in answers.items():
            setattr(self, name, Endpoint(name, self.calls, answer))

    @property
    def saves(self) -> int:
        """How often the policy was written."""
        return sum(call[0] == "save" for call in self.calls)


async def trained(ranks: Ranks, upto: int, steps: int = 3, since: int = 0) -> TrainerStage:
    """A trainer for so many steps, after some of them, each published."""
    trainer = TrainerStage(ReplaceableActors("trainer", ranks), steps=steps, folder=Path("policy"))
    await trainer.start()
    for index in range(since, upto):
        await trainer.step(SimpleNamespace(id=index))
        await trainer.publish()
    return trainer


def run_of(trainer: TrainerStage, *lost: str) -> Any:
    """As much of a run as saving looks at."""
    return SimpleNamespace(trainer=trainer, lost_actors=set(lost), progress=SimpleNamespace(note=lambda text: None))


async def test_the_last_steps_policy_is_saved_before_the_script_goes_on() -> None:
    ranks = Ranks()
    trainer = await trained(ranks, 2)
    assert ranks.saves == 0
    await trainer.step(SimpleNamespace(id=2))
    await trainer.publish()
    assert ("save", Path("policy")) in ranks.calls[-3:]  # beside the publish and the digest
    assert (ranks.saves, trainer.has_unsaved) == (1, False)


async def test_an_interrupt_right_after_the_last_step_or_while_it_is_saved_does_not_lose_the_policy() -> None:
    for publishes in (False, True):
        ranks = Ranks()
        trainer = await trained(ranks, 2)
        ranks.saved.clear()
        await trainer.step(SimpleNamespace(id=2))
        if publishes:
            publishing = asyncio.create_task(trainer.publish())
            await asyncio.sleep(0)
            publishing.cancel()
            await asyncio.wait([publishing])
        ending = asyncio.create_task(_save_policy(run_of(trainer), "interrupted"))
        await asyncio.wait([ending], timeout=0.01)
        assert not ending.done(), "the run's processes must not be stopped while the policy is written"
        ranks.saved.set()
        await ending
        assert (ranks.saves, trainer.has_unsaved) == (1, False)


@pytest.mark.parametrize(
    ("status", "lost", "saves"),
    [("failed", (), 1), ("failed", ("generator-0",), 1), ("failed", ("trainer",), 0), ("interrupted", (), 0)],
)
async def test_a_run_that_ends_between_two_steps_saves_what_it_has_unless_the_user_broke_it_off(
    status: str, lost: tuple[str, ...], saves: int
) -> None:
    ranks = Ranks()
    await _save_policy(run_of(await trained(ranks, 2), *lost), status)
    assert ranks.saves == saves


async def test_a_step_that_broke_off_leaves_nothing_to_save() -> None:
    ranks = Ranks()
    trainer = await trained(ranks, 1)
    ranks.broken = True
    with pytest.raises(RunFailed):
        await trainer.step(SimpleNamespace(id=1))
    await _save_policy(run_of(trainer), "failed")
    assert ranks.saves == 0


async def test_a_script_that_ends_early_leaves_its_policy_and_one_that_trained_nothing_leaves_none() -> None:
    ranks = Ranks(start=5)
    trainer = await trained(ranks, 5, steps=9, since=5)
    await trainer.save_newest()
    assert ranks.saves == 0
    await trainer.step(SimpleNamespace(id=5))
    await trainer.save_newest()
    assert ranks.saves == 1


async def test_a_policy_that_cannot_be_written_fails_the_step_that_made_it() -> None:
    ranks = Ranks()

    async def full(folder: Path) -> None:
        raise RunFailed("trainer.save failed: OSError: No space left on device")

    ranks.save = Endpoint("save", ranks.calls, full)
    with pytest.raises(RunFailed, match="No space left"):
        await trained(ranks, 3)


async def test_a_step_waits_for_the_save_of_the_version_before_it() -> None:
    ranks = Ranks()
    trainer = await trained(ranks, 1)
    ranks.saved.clear()
    saving = asyncio.create_task(trainer.save_version(1, Path("policies/000001")))
    await asyncio.sleep(0)
    stepping = asyncio.create_task(trainer.step(SimpleNamespace(id=1)))
    await asyncio.wait([stepping], timeout=0.01)
    assert ranks.calls[-1] == ("save", Path("policies/000001"))
    ranks.saved.set()
    await asyncio.gather(saving, stepping)
    assert trainer.policy_version == 2


async def test_a_version_that_the_trainer_no_longer_has_is_not_saved_as_that_version() -> None:
    ranks = Ranks()
    trainer = await trained(ranks, 2)
    with pytest.raises(RunFailed, match="is gone: the trainer is at 2"):
        await trainer.save_version(1, Path("policies/000001"))
    ranks.broken = True
    with pytest.raises(RunFailed, match="NaN"):
        await trainer.step(SimpleNamespace(id=2))
    with pytest.raises(RunFailed, match="the step after policy version 2 has failed"):
        await trainer.save_version(2, Path("policies/000002"))
    assert ranks.saves == 0


class NoHosts:
    """Hosts of a run that starts no process."""

    def __init__(self, *arguments: Any, **options: Any):
        """Takes what hosts take."""

    async def stop_all(self) -> None:
        """There is nothing to stop."""


@pytest.mark.parametrize("full", [False, True], ids=["room on the disk", "full disk"])
@pytest.mark.parametrize("error", [None, RuntimeError("the evaluation failed")])
async def test_a_started_run_saves_the_policy_of_a_script_that_stops_early_or_fails_and_fails_if_it_cannot(
    error: Exception | None, full: bool, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [f"model.path={tiny_model_folder}", "steps=9", "telemetry={tensorboard: false, progress: off, trace: false}"]
    config, ranks = load(RunConfig, argv, prog="test", description="").config, Ranks()
    no_space = RunFailed("trainer.save failed: OSError: No space left on device")

    async def fails(folder: Path) -> None:
        raise no_space

    ranks.save = Endpoint("save", ranks.calls, fails) if full else ranks.save

    async def bring_up(run: Any, *_: Any) -> None:
        run.trainer = await trained(ranks, 0, steps=9)
        run.generators = SimpleNamespace(supervise=asyncio.Event().wait)
        run.checkpoints = SimpleNamespace(finish=AsyncMock())

    monkeypatch.setattr("goaly.run.start._bring_up", bring_up)
    monkeypatch.setattr("goaly.run.start.Hosts", NoHosts)
    failures = []
    try:
        async with started(config, None, tmp_path) as run:  # type: ignore[arg-type]
            await run.trainer.step(SimpleNamespace(id=0))
            if error is not None:
                raise error
    except ExceptionGroup as group:
        failures = list(group.exceptions)
    assert failures == ([error] if error is not None else [no_space] if full else [])
    assert ranks.calls[-1] == ("save", Path("policy"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["policy_version"]) == ("failed" if failures else "finished", 1)

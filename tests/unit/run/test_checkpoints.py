"""When a run takes a checkpoint, what it waits for, and what a full disk does to it."""

import asyncio
import errno
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from goaly.durable.checkpoint import Checkpoints
from goaly.durable.settings import CheckpointSettings
from goaly.errors import RunFailed
from goaly.run.checkpoints import RunCheckpoints


class Model:
    """A stage whose state is its step."""

    def __init__(self) -> None:
        self.step = self.staged = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.error: Exception | None = None

    async def stage(self) -> int:
        self.staged = self.step
        return self.staged

    async def write(self, folder: Path) -> None:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        write(folder / "state", str(self.staged))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def write(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)


def content(file: Path) -> str:
    return file.read_text()


class Setup:
    """Checkpoints of a trainer and a critic."""

    def __init__(self, folder: Path, *, newest: int = 0, **settings: Any):
        self.folder = folder
        self.models = {"trainer": Model(), "critic": Model()}
        self.said: list[str] = []
        self.log_is_durable = asyncio.Event()
        self.log_is_durable.set()
        self.tasks: list[asyncio.Task[None]] = []
        self.checkpoints = RunCheckpoints(
            Checkpoints(folder),
            CheckpointSettings(**settings),
            self.models,
            newest=newest,
            durable=self._durable,
            create_task=self._create_task,
            say=self.said.append,
        )

    async def _durable(self) -> None:
        await self.log_is_durable.wait()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def steps(self, *steps: int) -> None:
        for step in steps:
            for model in self.models.values():
                model.step = step
            await self.checkpoints.after_step(step)

    async def written(self) -> list[str]:
        await asyncio.gather(*self.tasks)
        return names(self.folder)


async def test_a_checkpoint_is_taken_every_so_many_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    setup = Setup(tmp_path, every=2, keep=2)
    for step in range(1, 8):
        await setup.steps(step)
        await asyncio.gather(*setup.tasks)
    assert await setup.written() == ["000004", "000006"]
    assert content(tmp_path / "000006" / "critic" / "state") == "6"


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_is_left_out_until_it_is(
    tmp_path: Path,
) -> None:
    setup = Setup(tmp_path, every=1)
    setup.models["critic"].may_write.clear()
    await setup.steps(1, 2)
    assert setup.said == ["no checkpoint of step 2: the one before is still being written"]
    setup.models["critic"].may_write.set()
    assert await setup.written() == ["000001"]
    assert content(tmp_path / "000001" / "trainer" / "state") == "1"


async def test_a_checkpoint_appears_when_the_log_up_to_it_is_on_disk(tmp_path: Path) -> None:  # RC-1
    setup = Setup(tmp_path, every=1)
    setup.log_is_durable.clear()
    await setup.steps(1)
    await asyncio.wait(setup.tasks, timeout=0.2)
    assert names(tmp_path) == ["writing-000001"]
    setup.log_is_durable.set()
    assert await setup.written() == ["000001"]


async def test_models_of_different_steps_make_no_checkpoint(tmp_path: Path) -> None:  # RC-1
    setup = Setup(tmp_path, every=1)
    setup.models["trainer"].step = 1
    with pytest.raises(RunFailed, match="checkpoint of step 1: the critic is at step 0"):
        await setup.checkpoints.after_step(1)
    assert names(tmp_path) == []


async def test_a_full_disk_is_reported_and_the_next_checkpoint_is_whole(tmp_path: Path) -> None:  # RC-2
    setup = Setup(tmp_path, every=1)
    setup.models["critic"].error = OSError(errno.ENOSPC, "No space left on device", "critic/state")
    await setup.steps(1)
    assert await setup.written() == ["writing-000001"]
    assert setup.said == [
        "no checkpoint of step 1, it cannot be written: [Errno 28] No space left on device: 'critic/state'"
    ]
    setup.models["critic"].error = None
    await setup.steps(2)
    assert await setup.written() == ["000002"]


async def test_another_error_than_the_disks_is_not_hidden(tmp_path: Path) -> None:
    setup = Setup(tmp_path, every=1)
    setup.models["critic"].error = RunFailed("critic died")
    await setup.steps(1)
    with pytest.raises(RunFailed, match="critic died"):
        await setup.written()


@pytest.mark.parametrize(("newest", "step", "found"), [(0, 3, ["000003"]), (3, 3, []), (0, 0, [])])
async def test_at_the_end_there_is_a_checkpoint_of_the_last_step(
    tmp_path: Path, newest: int, step: int, found: list[str]
) -> None:
    setup = Setup(tmp_path, newest=newest, every=None)
    await setup.steps(step)
    await setup.checkpoints.finish(step)
    await setup.checkpoints.finish(step)
    assert await setup.written() == found


async def test_cancelled_at_any_await_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    for ticks in range(12):
        setup = Setup(tmp_path / str(ticks), every=1)
        setup.models["trainer"].step = setup.models["critic"].step = 1
        taking = asyncio.create_task(setup.checkpoints.after_step(1))
        for _ in range(ticks):
            await asyncio.sleep(0)
        for task in (taking, *setup.tasks):
            task.cancel()
        await asyncio.wait([taking, *setup.tasks])
        newest = Checkpoints(tmp_path / str(ticks)).newest()
        assert newest is None or content(newest.folder / "critic" / "state") == "1"
        await Setup(tmp_path / str(ticks), every=1).steps(2)

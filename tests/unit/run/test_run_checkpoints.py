"""When a run takes a checkpoint, what it waits for, and what a full disk does to it."""

import asyncio
import errno
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from goaly.base.errors import RunFailed
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.journal.checkpoint_settings import CheckpointSettings
from goaly.run.run_checkpoints import RunCheckpoints


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
        self.deleted: list[int] = []
        """The steps before which the log was deleted."""
        self.log_is_durable = asyncio.Event()
        self.log_is_durable.set()
        self.tasks: list[asyncio.Task[None]] = []
        self.checkpoints = RunCheckpoints(
            Checkpoints(folder),
            CheckpointSettings(**settings),
            self.models,
            newest=newest,
            durable=self._durable,
            delete_log=self.deleted.append,
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


async def test_a_checkpoint_appears_when_the_log_up_to_it_is_on_disk(tmp_path: Path) -> None:  # run-4
    setup = Setup(tmp_path, every=1)
    setup.log_is_durable.clear()
    await setup.steps(1)
    await asyncio.wait(setup.tasks, timeout=0.2)
    assert names(tmp_path) == ["writing-000001"]
    setup.log_is_durable.set()
    assert await setup.written() == ["000001"]


async def test_models_of_different_steps_make_no_checkpoint(tmp_path: Path) -> None:  # run-4
    setup = Setup(tmp_path, every=1)
    setup.models["trainer"].step = 1
    with pytest.raises(RunFailed, match="checkpoint of step 1: the critic is at step 0"):
        await setup.checkpoints.after_step(1)
    assert names(tmp_path) == []


async def test_a_full_disk_is_reported_and_the_next_checkpoint_is_whole(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("keep_log", "deleted"), [(True, []), (False, [1, 2])])
async def test_the_log_before_the_oldest_checkpoint_kept_is_deleted_only_if_it_is_not_kept(
    tmp_path: Path, keep_log: bool, deleted: list[int]
) -> None:
    setup = Setup(tmp_path, every=1, keep=2, keep_log=keep_log)
    for step in (1, 2, 3):
        await setup.steps(step)
        await setup.written()
    assert setup.deleted == deleted  # none while the log's beginning is what a damaged checkpoint would need


class InTurns:
    """Threads that do their work one turn of the event loop later, whether or not their caller still waits for it."""

    def __init__(self) -> None:
        self.doing: str | None = None

    async def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        done = asyncio.get_running_loop().create_future()

        def do() -> None:
            found = work(*arguments)
            if not done.done():
                done.set_result(found)

        asyncio.get_running_loop().call_soon(do)
        self.doing = getattr(work, "__name__", "")
        result = await done
        self.doing = None
        return result


async def test_cancelled_at_any_await_the_checkpoint_protocol_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = set()
    for turns in itertools.count():
        folder, threads = tmp_path / str(turns), InTurns()
        monkeypatch.setattr(asyncio, "to_thread", threads)
        setup = Setup(folder, every=1, keep=1, keep_log=False)
        await setup.steps(1)
        assert await setup.written() == ["000001"]
        taking = asyncio.create_task(setup.steps(2))
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks = [taking, *setup.tasks[1:]]
        if is_done := all(task.done() for task in tasks) and len(tasks) > 1:
            assert (names(folder), setup.deleted) == (["000002"], [1, 2])
        interrupted.add(threads.doing)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _ in range(5):
            await asyncio.sleep(0)  # threads end
        newest = Checkpoints(folder).newest()
        assert newest is not None, turns
        assert {content(newest.folder / name / "state") for name in setup.models} == {str(newest.step)}
        assert not setup.deleted or setup.deleted[-1] <= newest.step
        following = Setup(folder, every=1, keep=1, newest=newest.step)
        await following.steps(3)
        assert await following.written() == ["000003"]
        if is_done:
            break
    assert interrupted == {None, "begin", "commit", "prune", "append"}


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


async def test_a_checkpoint_of_the_same_step_is_taken_again_after_the_state_has_changed(tmp_path: Path) -> None:
    setup = Setup(tmp_path, every=1)
    await setup.steps(1)
    await setup.written()
    for model in setup.models.values():
        model.staged = -1
    await setup.checkpoints.replace(1)
    assert names(tmp_path) == ["000001"]
    assert content(tmp_path / "000001" / "trainer" / "state") == "1"
    assert len(setup.tasks) == 2
    await setup.checkpoints.finish(1)
    assert len(setup.tasks) == 2


async def test_state_that_is_written_beside_the_checkpoints_waits_for_theirs(tmp_path: Path) -> None:
    setup, order = Setup(tmp_path, every=1), []
    setup.models["trainer"].may_write.clear()
    await setup.steps(1)

    async def stage() -> int:
        order.append("stage")
        return 1

    async def write() -> None:
        order.append("write")

    beside = asyncio.create_task(setup.checkpoints.beside(stage, write))
    await asyncio.wait([beside], timeout=0.05)
    assert order == []
    setup.models["trainer"].may_write.set()
    assert await beside == 1
    assert order == ["stage", "write"]
    assert await setup.written() == ["000001"]

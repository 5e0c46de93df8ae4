"""Takes the checkpoints of a run: every `checkpoint.every` steps, at its end, and when it has to stop.

Training waits only until the state is copied; writing goes on in the background. The reference's weights are on disk
already (`reference_stage.py`).

A checkpoint that cannot be written is reported, and the run goes on. If its state was lost with a process, the end of
the run takes it again.

    run-4: A checkpoint holds the state of every trained model after the same step. It appears when all its files, and
        the records of the batches that led to it, are on disk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from goaly.base.errors import CorruptLog, RunFailed, os_error
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.journal.checkpoint_settings import CheckpointSettings
from goaly.run.replaceable_actors import Lost

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A stage with state that a checkpoint holds."""

    async def stage(self) -> int | None:
        """Copy the state aside; the number of steps that it is the result of, if each step changes it."""
        ...

    async def write(self, folder: Path) -> None:
        """Write the copy to this folder."""
        ...


class RunCheckpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSettings,
        stages: Mapping[str, Stateful],
        *,
        newest: int,
        durable: Callable[[], Awaitable[None]],
        delete_log: Callable[[int], None],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        say: Callable[[str], None],
    ):
        """`newest` is the step of the newest checkpoint; `durable` waits until the run's log is on disk; `delete_log`
        deletes what a run that goes on from this step or a later one does not need of it."""
        self._checkpoints = checkpoints
        self._settings = settings
        self._stages = stages
        self._newest: int | None = newest
        self._durable = durable
        self._delete_log = delete_log
        self._create_task = create_task
        self._say = say
        self._writing: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def after_step(self, step: int) -> None:
        """Take a checkpoint if one is due after this step, and return when the state is copied."""
        if self._settings.every is None or step % self._settings.every:
            return
        if self._writing is not None and not self._writing.done():
            self._say(f"no checkpoint of step {step}: the one before is still being written")
            return
        async with self._one_at_a_time:
            await self._take(step)

    async def finish(self, step: int) -> None:
        """Return when there is a checkpoint of this step, or when writing it has failed."""
        async with self._one_at_a_time:
            if self._writing is not None:
                await asyncio.shield(self._writing)
            while self._newest != step:
                await self._take(step)
                assert self._writing is not None
                await asyncio.shield(self._writing)

    async def replace(self, step: int) -> None:
        """Take the checkpoint of this step again, because the state has changed without a step; return when it is on
        disk, or when writing it has failed."""
        async with self._one_at_a_time:
            if self._writing is not None:
                await asyncio.shield(self._writing)
            await self._take(step)
            assert self._writing is not None
            await asyncio.shield(self._writing)

    async def beside(self, stage: Callable[[], Awaitable[int]], write: Callable[[], Awaitable[None]]) -> int:
        """Copy state by `stage` and write it by `write`, where no checkpoint uses the copy; the answer of `stage`."""
        async with self._one_at_a_time:
            if self._writing is not None:
                await asyncio.shield(self._writing)
            staged = await stage()
            await write()
            return staged

    async def _take(self, step: int) -> None:
        staged = await asyncio.gather(*(stage.stage() for stage in self._stages.values()))
        for name, at in zip(self._stages, staged, strict=True):
            if at is not None and at != step:
                raise RunFailed(f"checkpoint of step {step}: the {name} is at step {at}")  # run-4
        self._newest = step
        self._writing = self._create_task(self._write(step))

    async def _write(self, step: int) -> None:
        try:
            folder = await asyncio.to_thread(self._checkpoints.begin, step)
            await asyncio.gather(*(stage.write(folder / name) for name, stage in self._stages.items()))
            await self._durable()
            await asyncio.to_thread(self._checkpoints.commit, step, {})
        except Lost as lost:
            self._newest = None
            self._say(f"no checkpoint of step {step}: {lost}")
            return
        except Exception as error:
            if (cause := os_error(error)) is None:
                raise
            self._say(f"no checkpoint of step {step}, it cannot be written: {cause}")
            return
        try:
            oldest = await asyncio.to_thread(self._checkpoints.prune, self._settings.keep)
            if oldest is not None and not self._settings.keep_log:
                await asyncio.to_thread(self._delete_log, oldest)
        except (OSError, CorruptLog) as error:
            self._say(f"old checkpoints, or the log before them, cannot be removed: {error}")

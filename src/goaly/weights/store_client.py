"""A process's side of a weight store, which publishers and subscribers share.

It joins the store once, and sends pulses if the store can't watch its process. Its background tasks are not vital to
the process: when its pulses fail for good, the store counts it as ended and refuses its calls; when a writer can't be
registered for other hosts, the store tells the readers that wait for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

import torch

from goaly.base.process import this_process
from goaly.weights.copier import Copier
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoreClient:
    """A member of a store, until it is closed; `async with` closes it."""

    def __init__(self, store: WeightStore, settings: WeightSettings, gpu: torch.device | None, host: str | None):
        self._store = store
        self._settings = settings
        self._process = this_process(host)
        self._gpu = gpu
        self._copier = Copier(gpu)
        self._one_at_a_time = asyncio.Lock()
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the store."""
        raise NotImplementedError


class SharedTask(Generic[T]):
    """One run of some work, shared by all callers; after a failure the next caller runs it again."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]):
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The result. A cancelled caller leaves the work running for the next one."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            self._task = asyncio.create_task(self._work())
        return await asyncio.shield(self._task)

    async def end(self, *, cancel: bool = False) -> None:
        """Wait until the work has ended; `cancel` cancels it first."""
        task, self._task = self._task, None
        if task is not None:
            if cancel:
                task.cancel()
            await asyncio.wait({task})


class BackgroundTasks:
    """Tasks that end with their owner; failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this until it ends or `end` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def every(self, seconds: float, call: Callable[[], Awaitable[None]]) -> None:
        """Call this periodically, also after a failure."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await call()
                except Exception as error:
                    logger.warning("%s: %s", type(error).__name__, error)

        self.start(repeat())

    def end(self) -> None:
        """Cancel them all."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: %s", type(error).__name__, error)

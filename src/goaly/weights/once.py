"""What is done once for all who ask, and outlives the cancellation of who asked first."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Once(Generic[Result]):
    """Work that the first call begins and that answers all of them; once it has failed, the next begins it anew."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Result]]):
        self._work = work
        self._task: asyncio.Task[Result] | None = None

    async def __call__(self) -> Result:
        """What came of it. A cancelled caller leaves the work to the next."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            self._task = asyncio.create_task(self._work())
        return await asyncio.shield(self._task)

    async def end(self, *, cancel: bool = False) -> None:
        """Return once nothing is under way any more: it is waited for, or cancelled."""
        task, self._task = self._task, None
        if task is not None:
            if cancel:
                task.cancel()
            await asyncio.wait({task})

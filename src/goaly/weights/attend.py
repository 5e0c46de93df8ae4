"""Small tasks beside a publisher or a subscriber: what it does for others while it is there.

None of them is vital to its own process: when a pulse fails for good, the store counts the member as ended and refuses
its calls, and when an offer fails, the store tells the readers that wait for it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Attendants:
    """Tasks that end with their owner. What fails is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this until it ends, or all are ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def every(self, seconds: float, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call this every so many seconds, also after it has failed."""

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

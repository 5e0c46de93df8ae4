"""Tells what the run waits for while it waits long: a task beside the wait, so the wait itself polls nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)

FIRST_SECONDS = 30.0
"""A wait is told after so many seconds, and again whenever it has doubled."""
MOST_SECONDS_BETWEEN = 3600.0
ANSWER_SECONDS = 5.0
"""An actor that is asked what it is doing has so long to answer."""


@asynccontextmanager
async def telling(tell: Callable[[float], Awaitable[None]], after: float = FIRST_SECONDS) -> AsyncIterator[None]:
    """While the block runs, call `tell` with the seconds that it has taken: `after`, then twice as many, and so on."""

    async def tell_again_and_again() -> None:
        waited, pause = 0.0, after
        while True:
            await asyncio.sleep(pause)  # Unblocked by the block's end, which cancels.
            waited += pause
            pause = min(waited, MOST_SECONDS_BETWEEN)
            try:
                await tell(waited)
            except Exception as error:  # what it would have told of ends the run, or comes back
                logger.info("can't say what is waited for: %s: %s", type(error).__name__, error)

    telling = asyncio.create_task(tell_again_and_again(), name="telling")
    try:
        yield
    finally:
        telling.cancel()


async def all_of(work: Mapping[str, Coroutine[Any, Any, Any]], doing: str, say: Callable[[str], None]) -> None:
    """Do all of this at once; while it takes long, `say` which of it is not done."""

    async def tell(seconds: float) -> None:
        left = [task.get_name() for task in tasks if not task.done()]
        say(f"{doing} for {seconds:.0f} s: waiting for {', '.join(left)}")

    async with telling(tell), asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in work.items()]

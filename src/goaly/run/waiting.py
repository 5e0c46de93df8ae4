"""Tells what the run waits for while it waits long: a task beside the wait, so the wait itself polls nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

FIRST_SECONDS = 30.0
"""A wait is told after so many seconds, and again whenever it has doubled."""
MOST_SECONDS_BETWEEN = 3600.0
ANSWER_SECONDS = 5.0
"""An actor that is asked what it is doing has so long to answer."""


@asynccontextmanager
async def telling(tell: Callable[[float], Awaitable[None]]) -> AsyncIterator[None]:
    """While the block runs, call `tell` with the seconds that it has taken: 30, 60, 120, ..."""

    async def tell_again_and_again() -> None:
        waited, pause = 0.0, FIRST_SECONDS
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

"""Reports long waits, from a task beside the wait: the wait itself polls nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)

FIRST_SECONDS = 30.0
"""A wait is reported after this many seconds, and again whenever it has doubled."""
MOST_SECONDS_BETWEEN = 3600.0
ANSWER_SECONDS = 5.0
"""Longest wait for an actor to report its progress."""


@asynccontextmanager
async def reporting(report: Callable[[float], Awaitable[None]], after: float = FIRST_SECONDS) -> AsyncIterator[None]:
    """While the block runs, call `report` with the seconds that it has taken: `after`, then twice as many, and so
    on."""

    async def report_repeatedly() -> None:
        waited, pause = 0.0, after
        while True:
            await asyncio.sleep(pause)  # ended by the block's end, which cancels this task
            waited += pause
            pause = min(waited, MOST_SECONDS_BETWEEN)
            try:
                await report(waited)
            except Exception as error:  # a failed report does not end the run
                logger.info("cannot report a wait: %s: %s", type(error).__name__, error)

    reports = asyncio.create_task(report_repeatedly(), name="report a wait")
    try:
        yield
    finally:
        reports.cancel()


async def run_all(work: Mapping[str, Coroutine[Any, Any, Any]], doing: str, say: Callable[[str], None]) -> None:
    """Run all of these at once. If they take long, `say` which are not done."""

    async def report(seconds: float) -> None:
        left = [task.get_name() for task in tasks if not task.done()]
        say(f"{doing} for {seconds:.0f} s: waiting for {', '.join(left)}")

    async with reporting(report), asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in work.items()]

"""Runs an episode under a time limit, also if the episode ignores its cancellation.

Invariants
    EL-1  `within` ends at most `CANCEL_SECONDS` after its limit or its own cancellation. Work that still runs then is
          abandoned: a warning is logged, and its result is dropped.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from goaly.errors import EpisodeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 10.0
"""Time for an episode to clean up after it was cancelled."""


class TimedOut(EpisodeError):
    """An episode or a group exceeded its time limit."""

    reason: ClassVar[str] = "timeout"
    """The reason of the failure in the run's accounting."""


class EpisodeTimeout(TimedOut):
    """An episode exceeded `rollout.episode_seconds`."""

    reason = "episode_timeout"


class GroupTimeout(TimedOut):
    """A group exceeded `rollout.group_seconds`."""

    reason = "group_timeout"


_abandoned: set[asyncio.Task[Any]] = set()


async def within(seconds: float | None, work: Coroutine[Any, Any, T], name: str) -> T:
    """The result or error of the work; EpisodeTimeout if it takes longer than the limit (None: no limit)."""
    task = asyncio.create_task(work, name=name)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise EpisodeTimeout(f"{name} exceeded rollout.episode_seconds={seconds}")
        if task.cancelled():
            raise EpisodeError(f"{name} cancelled itself")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            try:
                await asyncio.wait([task], timeout=CANCEL_SECONDS)  # EL-1
            finally:
                _abandon(task)


def _abandon(task: asyncio.Task[Any]) -> None:
    if task.done():
        _report_end(task)
        return
    logger.warning("%s still runs %g s after it was cancelled, and is abandoned", task.get_name(), CANCEL_SECONDS)
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.add_done_callback(_report_end)


def _report_end(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("%s ended after it was cancelled: %s: %s", task.get_name(), type(error).__name__, error)

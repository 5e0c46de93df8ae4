"""Actors that are replaced as in a run, without processes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from goaly.run.replaceable_actors import ReplaceableActors, Restarts


async def kill_nothing(name: str) -> None:
    """There is no process."""


def keep(
    actors: ReplaceableActors[Any],
    replace: Callable[[str], Awaitable[Any]],
    *,
    limit: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> asyncio.Task[None]:
    """Replace these actors until the task is cancelled, `limit` times at most; no training step is made."""
    kept = actors.keep(replace, kill=kill_nothing, restarts=Restarts(limit, lambda: 0), say=say, report_seconds=0.0)
    return asyncio.ensure_future(kept)

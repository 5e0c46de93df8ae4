"""The generator service: replicas that are started together, watched, and replaced when they die.

Owned by the controller. The processes that sample hold a `Router` each; `announce` tells them which replicas serve.

Invariants
    GS-1  A replica serves only after it has caught up to the newest committed version.
    GS-2  A dead replica leaves every routing table at once and is replaced; more than `MAX_REPLACEMENTS` deaths of one
          replica end the run with an error that names it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from goaly.errors import RunFailed
from goaly.generate.request import GeneratorStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REPLACEMENTS = 5

Spawn = Callable[[str], Awaitable[Any]]
"""Spawns one replica's actors (a rank each) under this name and returns them, not yet started."""

Announce = Callable[[Mapping[int, Any]], Awaitable[None]]
"""Tells every router which replicas serve, by index."""


class GeneratorService:
    """Keeps `replicas` generators serving."""

    def __init__(
        self,
        *,
        replicas: int,
        spawn: Spawn,
        retire: Callable[[str], Awaitable[None]],
        announce: Announce,
    ):
        self._replicas = replicas
        self._spawn = spawn
        self._retire = retire
        self._announce = announce
        self._names: dict[str, int] = {}
        self._replaced: set[str] = set()
        self._serving: dict[int, Any] = {}
        self._deaths: dict[int, int] = dict.fromkeys(range(replicas), 0)
        self._lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def start(self) -> None:
        """Start every replica; they serve when this returns."""
        async with asyncio.TaskGroup() as starts:
            for index in range(self._replicas):
                starts.create_task(self._bring_up(index))
        await self._announce(self._serving)

    def lost(self, name: str, report: str) -> bool:
        """Take note that the actors of this name died; True if they are, or were, those of a replica.

        A death may be told twice, half a minute apart: then the replacement serves already.
        """
        if name in self._names:
            self._lost.put_nowait((name, report))
        return name in self._names or name in self._replaced

    async def supervise(self) -> None:
        """Replace replicas as they die, until cancelled."""
        async with asyncio.TaskGroup() as replacements:
            while True:
                name, report = await self._lost.get()  # `lost` unblocks it
                index = self._names.pop(name, None)
                if index is None:
                    continue
                self._replaced.add(name)
                self._serving.pop(index, None)
                await self._announce(self._serving)  # GS-2
                self._deaths[index] += 1
                if self._deaths[index] > MAX_REPLACEMENTS:
                    raise RunFailed(f"generator {index} died {self._deaths[index]} times; the last report: {report}")
                logger.warning("generator %d died and is being replaced: %s", index, _last_line(report))
                replacements.create_task(self._replace(index, name))

    async def stats(self) -> list[GeneratorStats]:
        """The counts of the replicas that answer."""
        asked = [_unless_dead(handle.stats.call_one()) for handle in self._serving.values()]
        return [stats for stats in await asyncio.gather(*asked) if stats is not None]

    async def close(self) -> None:
        """Let go of what the replicas hold."""
        await asyncio.gather(*(_unless_dead(handle.close.call_one()) for handle in self._serving.values()))

    async def _replace(self, index: int, dead: str) -> None:
        await self._retire(dead)
        try:
            serves = await self._bring_up(index)
        except SupervisionError:
            return  # it died while starting; `lost` hears of that too, and counts it
        if serves:
            await self._announce(self._serving)
            logger.warning("generator %d serves again", index)

    async def _bring_up(self, index: int) -> bool:
        name = f"generator-{index}" if self._deaths[index] == 0 else f"generator-{index}-{self._deaths[index]}"
        self._names[name] = index
        ranks = await self._spawn(name)
        await ranks.start.call()  # GS-1: returns when it has caught up
        if name not in self._names:
            return False  # it died while starting, and its own replacement is under way
        self._serving[index] = ranks.slice(procs=0)  # the rank that takes requests
        return True


async def _unless_dead(answer: Awaitable[T]) -> T | None:
    try:
        return await answer
    except SupervisionError:
        return None  # `lost` hears of it


def _last_line(report: str) -> str:
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return lines[-1] if lines else "no report"

"""The generator service: starts the replicas, watches them, and replaces those that die.

The processes of a replica have a unique name by which routers know it: `generator-0`, then `generator-0-1` for its
first replacement.

A replica serves only after it has caught up to the store's newest version (generate-8). Routing tables reach every
router in the order in which they changed. A replacement that dies before it serves, that raises while it starts, or
that takes longer than `generator.start_minutes` counts as a death. More than `MAX_DEATHS` deaths within
`WINDOW_SECONDS` of serving time end the run with an error that names the replica; the time of starts does not count.

    generate-11: The death of any rank of a replica is the death of the replica: it leaves every routing table at once,
        its other ranks are killed (one of them may wait for the dead one forever), and a replacement starts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from goaly.base.actors import SupervisionError
from goaly.base.errors import RunFailed, cause_of, root_cause
from goaly.generate.generator import Generator
from goaly.generate.request import GeneratorStats
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEATHS = 5
WINDOW_SECONDS = 600.0

Spawn = Callable[[str], Awaitable[Generator]]
"""Spawns a replica's actors, one for each rank, under this name; returns them before they are started."""

Announce = Callable[[Mapping[str, Generator]], Awaitable[None]]
"""Tells every router which replicas serve, by name."""


@dataclass(kw_only=True, eq=False)
class GeneratorService:
    """Keeps the configured number of generator replicas serving."""

    replicas: int
    spawn: Spawn
    kill: Callable[[str], Awaitable[None]]
    """Ends all processes of this name."""
    announce: Announce
    start_minutes: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._replicas = [_Replica(index) for index in range(self.replicas)]
        self._deaths: dict[str, asyncio.Future[str]] = {}
        self._serving: dict[str, Generator] = {}
        """All ranks of each replica that serves."""
        self._announcing = asyncio.Lock()

    async def start(self) -> None:
        """Start every replica; all serve on return. A replica that cannot be started ends the run."""
        async with asyncio.TaskGroup() as starts:
            for replica in self._replicas:
                starts.create_task(self._start_first(replica))
        await self._announce_serving()

    async def follow(self, store: WeightStore) -> None:
        """Have every replica follow this weight store, which replaces one that died. One that was starting starts
        again."""
        self.lose_starting("the weight store died while it started")
        await asyncio.gather(*(_unless_dead(ranks.follow.call(store)) for ranks in self._serving.values()))

    def lose_starting(self, report: str) -> None:
        """Report the death of every replica that does not serve yet."""
        for replica in self._replicas:
            if replica.name not in self._serving:
                self.lost(replica.name, report)

    def lost(self, name: str, report: str) -> bool:
        """Report the death of an actor or a process of this name; True if it belongs, or belonged, to a replica.

        The same death may be reported twice, half a minute apart: then the replacement serves already.
        """
        death = self._deaths.get(name)
        if death is not None and not death.done():
            death.set_result(report)
        return death is not None

    async def supervise(self) -> None:
        """Replace replicas that die, until cancelled."""
        async with asyncio.TaskGroup() as keepers:
            for replica in self._replicas:
                keepers.create_task(self._keep(replica), name=f"keep {replica.name}")

    @property
    def serving(self) -> Mapping[str, Generator]:
        """The replicas that serve, by name: their ranks that take requests."""
        return self._first_ranks()

    async def stats(self) -> list[GeneratorStats]:
        """The counts of the replicas that answer."""
        answers = [_unless_dead(handle.stats.call_one()) for handle in self._first_ranks().values()]
        return [stats for stats in await asyncio.gather(*answers) if stats is not None]

    async def close(self) -> None:
        """Close the replicas."""
        await asyncio.gather(*(_unless_dead(handle.close.call_one()) for handle in self._first_ranks().values()))

    async def _start_first(self, replica: "_Replica") -> None:
        failure = await self._begin(replica)
        if failure is not None:
            raise RunFailed(f"{replica.name} {failure}")

    async def _keep(self, replica: "_Replica") -> None:
        while True:
            began = self.clock()
            report = await self._deaths[replica.name]  # `lost` unblocks it
            replica.served += self.clock() - began
            del self._serving[replica.name]
            await asyncio.gather(self._announce_serving(), self.kill(replica.name))  # generate-11
            failure: str | None = f"died: {_last_line(report)}"
            while failure is not None:
                self._count(replica, failure)
                logger.warning("generator %d %s; it is being replaced", replica.index, failure)
                replica.replacements += 1
                failure = await self._begin(replica)
            await self._announce_serving()
            logger.warning("generator %d serves again", replica.index)

    def _count(self, replica: "_Replica", failure: str) -> None:
        """Count a death; RunFailed if there were too many."""
        recent = [death for death in replica.deaths if death > replica.served - WINDOW_SECONDS]
        replica.deaths = [*recent, replica.served]
        if len(replica.deaths) > MAX_DEATHS:
            raise RunFailed(
                f"generator {replica.index} died or failed to start {len(replica.deaths)} times within "
                f"{WINDOW_SECONDS / 60:.0f} minutes of serving; the last time it {failure}"
            )

    async def _begin(self, replica: "_Replica") -> str | None:
        """Spawn and start a replica; None if it serves. Otherwise kill its processes and return the reason."""
        name = replica.name
        death = self._deaths[name] = asyncio.get_running_loop().create_future()
        starting = asyncio.create_task(self._started(name), name=f"start {name}")
        try:
            await asyncio.wait([starting, death], timeout=60 * self.start_minutes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()  # no effect once it has ended
            await asyncio.wait([starting])  # a cancelled call ends at once
        error = None if starting.cancelled() else starting.exception()
        if death.done():
            failure = f"died while it started: {_last_line(death.result())}"
        elif starting.cancelled():
            failure = f"did not start within generator.start_minutes={self.start_minutes:g}"
        elif error is not None:
            logger.info("%s failed to start", name, exc_info=error)
            cause = root_cause(error)
            why = _last_line(str(cause)) if isinstance(cause, SupervisionError) else cause_of(cause)
            failure = f"failed to start: {why}"
        else:
            self._serving[name] = starting.result()
            return None
        await self.kill(name)
        return failure

    async def _started(self, name: str) -> Generator:
        ranks = await self.spawn(name)
        for rank in ranks.start.stream():
            await rank  # stop at the first failure: the other ranks may wait for the failed one
        return ranks

    async def _announce_serving(self) -> None:
        async with self._announcing:
            await self.announce(self._first_ranks())

    def _first_ranks(self) -> dict[str, Generator]:
        """The rank of each serving replica that takes requests."""
        return {name: ranks.slice(procs=0) for name, ranks in self._serving.items()}


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica and its replacements."""

    index: int
    replacements: int = 0
    served: float = 0.0
    """Seconds of serving so far."""
    deaths: list[float] = field(default_factory=list)
    """When the recent deaths were, in seconds of serving."""

    @property
    def name(self) -> str:
        """The name of its processes."""
        return f"generator-{self.index}-{self.replacements}" if self.replacements else f"generator-{self.index}"


async def _unless_dead(answer: Awaitable[T]) -> T | None:
    try:
        return await answer
    except SupervisionError:
        return None  # reported to `lost`


def _last_line(report: str) -> str:
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return lines[-1] if lines else "no report"

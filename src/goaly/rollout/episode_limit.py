"""`rollout.concurrency=auto`: how many episodes run at once, from the load of the engines.

An episode that waits for an engine costs nothing in the engine, but its environment lives, its later turns wait behind
the first turns of others, and the cache of its conversation is evicted meanwhile. So as many run as the engines have
room for, and a few more.

    rollout-10: The limit is at least the episodes of one step, however full the engines are: a step never waits for a
        place that only its own end would free.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Protocol

from goaly.base.inflight_limit import RESERVE, InflightLimit, MeasuredLoad
from goaly.generate.request import GeneratorStats
from goaly.rollout.group_runner import GroupSummary
from goaly.rollout.settings import MOST_EPISODES

PAUSE_SECONDS = 0.5
"""Least time between two measurements."""

Stats = Callable[[], Awaitable[Sequence[GeneratorStats]]]


class EpisodeWorkers(Protocol):
    """The rollout workers."""

    @property
    def count(self) -> int:
        """The number of workers."""
        ...

    async def limit_episodes(self, most: int) -> list[tuple[int, int]]:
        """Have every worker run at most this many episodes at once. For each worker that answers, how many have a place
        and how many wait for one."""
        ...


class EpisodeLimit:
    """Measures after groups have ended, and tells the workers."""

    def __init__(self, workers: EpisodeWorkers, stats: Stats, *, groups_per_step: int, group_size: int):
        self._workers = workers
        self._stats = stats
        self._group_size = group_size
        self._step_episodes = groups_per_step * group_size
        self._limit: InflightLimit | None = None
        self._ended = self._failed = self._preemptions = 0
        self._ends = asyncio.Event()

    @property
    def value(self) -> int:
        """The present limit of all workers together."""
        return self._step_episodes if self._limit is None else self._limit.value

    async def start(self) -> None:
        """Begin with what the engines have room for."""
        engines = await self._stats()
        self._preemptions = sum(one.preemptions for one in engines)
        room = ceil(RESERVE * sum(one.max_running for one in engines))
        most = MOST_EPISODES * self._workers.count
        least = min(self._step_episodes, most)  # rollout-10
        self._limit = InflightLimit(start=room, least=least, most=most)
        await self._tell()

    def ended(self, group: GroupSummary) -> None:
        """Count the episodes of a group that has ended."""
        if group.failed is not None:
            self._failed += self._group_size
        self._ended += len(group.rewards)
        self._ends.set()

    async def follow(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await self._ends.wait()  # the next group's end sets it
            self._ends.clear()
            await self.measure()
            await asyncio.sleep(PAUSE_SECONDS)

    async def measure(self) -> None:
        """Measure once, and tell the workers their limit."""
        assert self._limit is not None, "start comes first"
        engines = await self._stats()
        ended, failed, self._ended, self._failed = self._ended, self._failed, 0, 0
        places = await self._tell()
        preemptions = sum(one.preemptions for one in engines)
        taken = sum(taken for taken, _ in places)
        load = MeasuredLoad(
            under_way=taken if taken > self._of_each * self._workers.count else min(taken, self._limit.value),
            holds_back=any(waiting for _, waiting in places),
            cache_use=max((one.cache_use for one in engines), default=0.0),
            queued=sum(one.queued for one in engines),
            preemptions=max(0, preemptions - self._preemptions),  # a replaced engine counts from 0
            ended=ended,
            failed=failed,
        )
        self._preemptions = preemptions
        before = self._limit.value
        self._limit.observe(load)
        if self._limit.value != before:
            await self._tell()

    @property
    def _of_each(self) -> int:
        """The limit of one worker: rounded up, so all together may exceed the limit by a few."""
        return ceil(self.value / self._workers.count)

    async def _tell(self) -> list[tuple[int, int]]:
        return await self._workers.limit_episodes(self._of_each)

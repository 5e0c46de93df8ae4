"""Warm environments that episodes lease: at most `size` at once, shared fairly between tasks.

Episodes count the environments that they start or have replaced, and whether they had to wait, as `environment/…`.

Tasks that wait get environments in turn: while a task waits, no other gets two. Within a task, the first to wait is the
first to get one. An environment that is dead, or that an episode left in an unknown state, is closed and replaced.

    environments-4: At most `size` environments exist at once, those that start or close included, and no place is lost:
        neither a cancelled waiter nor a failed start keeps one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from goaly.base.errors import cause_of
from goaly.base.telemetry.metrics import count

logger = logging.getLogger(__name__)


class Pooled(Protocol):
    """A member of a pool: an `Environment`, or the tools of an MCP server."""

    @property
    def alive(self) -> bool:
        """Whether it can be leased again."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


E = TypeVar("E", bound=Pooled)


class FairPlaces:
    """N places, given to the tasks that wait in turn."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return sum(map(len, self._waiting.values()))

    async def take(self, task: Hashable) -> None:
        """Wait for a place."""
        if self._free:
            self._free -= 1
            return
        count("environment/waits")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, deque()).append(turn)
        try:
            await turn  # unblocked by `give`
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()  # environments-4: it got the place at the moment of its cancellation
            elif task in self._waiting and turn in self._waiting[task]:
                self._waiting[task].remove(turn)
                if not self._waiting[task]:
                    del self._waiting[task]
            raise

    def give(self) -> None:
        """Give a place back: the task that has waited longest for its turn gets it."""
        while self._waiting:
            task = next(iter(self._waiting))
            turns = self._waiting.pop(task)
            turn = turns.popleft()
            if turns:
                self._waiting[task] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class EnvironmentPool(Generic[E]):
    """Environments of one kind. Used as `async with EnvironmentPool(make, size=8) as pool:`."""

    def __init__(self, make: Callable[[], Awaitable[E]], *, size: int):
        """`make` starts an environment, when one is needed and none is warm."""
        self._make = make
        self._places = FairPlaces(size)
        self._warm: list[E] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self.started = 0
        """Environments that were started so far."""
        self.replaced = 0
        """Environments that were closed because they were dead or in an unknown state."""

    @property
    def waiting(self) -> int:
        """The number of episodes that wait for an environment."""
        return self._places.waiting

    @asynccontextmanager
    async def lease(self, task: Hashable) -> AsyncIterator[E]:
        """An environment for one episode of this task, such as the name of a prompt's source."""
        await self._places.take(task)
        try:
            environment = await self._warm_one()
        except BaseException:
            self._places.give()  # environments-4
            raise
        try:
            yield environment
        finally:
            self._return(environment)

    async def close(self) -> None:
        """Close all environments. Those that are leased are closed when they come back."""
        self._closed = True
        for environment in self._warm:
            self._close(environment)
        self._warm.clear()
        while self._closing:
            await asyncio.wait(self._closing)

    async def __aenter__(self) -> "EnvironmentPool[E]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _warm_one(self) -> E:
        while self._warm:
            environment = self._warm.pop()  # the last one that was used: its memory is in the caches
            if environment.alive:
                return environment
            self._replace()
            await asyncio.shield(self._close(environment))
        environment = await self._make()
        self.started += 1
        count("environment/started")
        return environment

    def _return(self, environment: E) -> None:
        if environment.alive and not self._closed:
            self._warm.append(environment)
            self._places.give()
        else:
            if not environment.alive:
                self._replace()
            self._close(environment, self._places.give)  # environments-4: the place is free when it is closed

    def _replace(self) -> None:
        self.replaced += 1
        count("environment/replaced")

    def _close(self, environment: E, then: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        closing = asyncio.ensure_future(self._closed_quietly(environment))
        self._closing.add(closing)
        closing.add_done_callback(lambda closed: (self._closing.discard(closed), then()))
        return closing

    async def _closed_quietly(self, environment: E) -> None:
        try:
            await environment.close()
        except Exception as error:
            logger.warning("closing an environment: %s", cause_of(error))

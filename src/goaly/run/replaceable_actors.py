"""Actors of one role that are replaced when one of their processes dies.

The processes of a role are one unit: when one dies, the others are killed, because they may wait for it for ever. Their
replacement has a name of its own (`trainer`, then `trainer-1`), so that a late report of the first death is not taken
for another one.

A call waits while its actors are being replaced, and until they have caught up. More than `checkpoint.restarts` deaths
in a row without a training step in between end the run.

    run-5: A call ends: with an answer, with its endpoint's error, or with `Lost` if a process died meanwhile. An error
        that the death of another actor causes is not the endpoint's: the actors are replaced with it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from goaly.base.actors import SupervisionError, named, running, unless
from goaly.base.errors import GoalyError, RunFailed, root_cause

logger = logging.getLogger(__name__)

T = TypeVar("T")
Actors = TypeVar("Actors")


class Lost(GoalyError):
    """A process of these actors died during a call; the call can be made again."""

    is_own = True
    """False if they died with another role, which they call."""


class Restarts:
    """The number of replacements that each role has left. The run ends when a role has none left."""

    def __init__(self, limit: int, policy_version: Callable[[], int]):
        """`limit` replacements of a role in a row at the same policy version."""
        self._limit = limit
        self._policy_version = policy_version
        self._spent: dict[str, tuple[int, int]] = {}

    def spend(self, role: str, report: str) -> None:
        """Count a death; RunFailed if there were too many."""
        version = self._policy_version()
        at, count = self._spent.get(role, (version, 0))
        count = count + 1 if at == version else 1
        self._spent[role] = version, count
        if count > self._limit:
            raise RunFailed(
                f"{role} died {count} times without a training step in between (checkpoint.restarts={self._limit}); "
                f"the last time: {report}"
            )


class ReplaceableActors(Generic[Actors]):
    """The actors of a role, as callers reach them."""

    def __init__(self, role: str, actors: Actors):
        """Until `keep` runs, they are not replaced: their death is the error of the call."""
        self.role = role
        self.name = role
        """The name of their present processes."""
        self.recoverable = True
        """Whether new actors could have their state. If not, they are not replaced."""
        self._actors = actors
        self._names = {role}
        self._died = asyncio.Event()
        self._is_own_death = True
        self._report: str | None = None
        """Why they died; None while they serve."""
        self._serves = asyncio.Event()
        self._serves.set()
        self._is_kept = False
        self._report_seconds = 0.0
        self._has_peers = False

    @property
    def serves(self) -> bool:
        """Whether a call would be made at once."""
        return self._report is None

    def lost(self, name: str, report: str, *, is_own: bool = True) -> bool:
        """Report the death of an actor or a process of this name; True if it belonged to this role and is replaced.
        The death of a role that dies with another one (`is_own=False`) does not count for `Restarts`."""
        if name not in self._names or (name == self.name and not (self._is_kept and self.recoverable)):
            return False
        if name == self.name:
            self._die(report, is_own=is_own)
        return True

    async def present(self) -> Actors:
        """The actors, once they serve."""
        await self._serves.wait()  # unblocked by the replacement, or by the end of `keep`
        if self._report is not None:
            raise RunFailed(f"{self.role} died: {self._report}")
        return self._actors

    async def call(self, endpoint: str, call: Callable[[Actors], Awaitable[T]]) -> T:
        """The answer of the actors to this call; `Lost` if one of their processes dies before (run-5). A failure is a
        RunFailed that names the endpoint."""
        actors = await self.present()
        died, name = self._died, self.name
        async with running(call(actors)) as answer, running(died.wait()) as death:
            await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
            is_answered = answer.done()
        error = None
        if is_answered:
            if (failure := answer.exception()) is None:
                return answer.result()
            error = named(endpoint, failure)
        if error is not None and self._is_kept:
            if _is_death(error):
                self.lost(name, str(error))
            elif not isinstance(error, Lost) and (self._has_peers or _is_death(root_cause(error.__cause__ or error))):
                with suppress(TimeoutError):
                    await asyncio.wait_for(died.wait(), self._report_seconds)  # unblocked by `lost`
        if died.is_set():
            lost = Lost(f"{name} died: {self._report}")
            lost.is_own = self._is_own_death
            raise lost
        assert error is not None
        raise error

    def broadcast(self, call: Callable[[Actors], None]) -> None:
        """Make this call to the present actors, dead or alive, without an answer."""
        call(self._actors)

    async def keep(
        self,
        replace: Callable[[str], Awaitable[Actors]],
        *,
        kill: Callable[[str], Awaitable[None]],
        restarts: Restarts,
        say: Callable[[str], None],
        report_seconds: float,
        has_peers: bool = False,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace the processes whenever one dies, until cancelled.

        `replace` spawns and starts the actors under this name, and brings them to the state that the run is in. `kill`
        ends the processes of a name. An error that another actor's death causes may come `report_seconds` before the
        report of that death. `has_peers`: the death of another actor may cause any error of these actors. `on_death` is
        called when actors that have served die.
        """
        self._is_kept = True
        self._report_seconds, self._has_peers = report_seconds, has_peers
        try:
            served = True
            while True:
                await self._died.wait()  # unblocked by `lost`
                if served:
                    on_death()
                if self._is_own_death:
                    restarts.spend(self.role, self._report or "")
                say(f"{self.name} died: {self._report}; it is being replaced")
                await kill(self.name)
                if served := await self._replace(replace):
                    say(f"{self.name} serves in its place")
        finally:
            self._is_kept = False
            self._serves.set()

    def _die(self, report: str, *, is_own: bool) -> None:
        if not self._died.is_set():
            self._report, self._is_own_death = report, is_own
            self._serves.clear()
            self._died.set()

    async def _replace(self, replace: Callable[[str], Awaitable[Actors]]) -> bool:
        """Replace the processes; False if the new ones have died, too, or could not be brought up."""
        self.name = f"{self.role}-{len(self._names)}"
        self._names.add(self.name)
        self._died = died = asyncio.Event()
        replaced = await unless(died, replace(self.name))
        if replaced is not None and (error := replaced.exception()) is not None:
            logger.info("%s was not brought up", self.name, exc_info=error)
            self._die(str(error), is_own=not isinstance(error, Lost))
        if replaced is None or died.is_set():
            return False
        self._actors, self._report = replaced.result(), None
        self._serves.set()
        return True


def _is_death(error: BaseException | None) -> bool:
    return isinstance(error, SupervisionError) or isinstance(getattr(error, "__cause__", None), SupervisionError)

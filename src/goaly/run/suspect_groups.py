"""The groups under which rollout workers have died, one of which may be what kills them.

A worker's death does not tell which of its groups caused it. Most deaths have nothing to do with a group, so groups
with one death run like any other. After two a group is a suspect: the suspects of a worker begin one after
the other, each when the one before has ended or has run for `SUSPECT_SECONDS`. A group that kills its worker soon after
its start then does so beside no other suspect that has not lived longer, and fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from goaly.generate.connection import Quarantine

SUSPECT_SECONDS = 30.0


class SuspectTurn:
    """The time in which a suspect runs beside no other that has just begun."""

    def __init__(self, quarantine: Quarantine, name: str) -> None:
        self._quarantine = quarantine
        self._name = name
        self._end: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Count the time from now on: the worker serves."""
        loop = asyncio.get_running_loop()
        self._end = self._end or loop.call_later(SUSPECT_SECONDS, self._quarantine.leave, self._name)

    def end(self) -> None:
        """Let the next suspect begin."""
        if self._end is not None:
            self._end.cancel()
        self._quarantine.leave(self._name)


class SuspectGroups:
    """The suspects of one worker."""

    def __init__(self) -> None:
        self._quarantine = Quarantine()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[SuspectTurn]:
        """Wait until no other suspect has just begun here; the block is this one's run. Names are unique."""
        may_begin, turn = asyncio.Event(), SuspectTurn(self._quarantine, name)
        self._quarantine.enter(name, may_begin.set)
        try:
            await may_begin.wait()  # unblocked by the end of the turns before
            yield turn
        finally:
            turn.end()

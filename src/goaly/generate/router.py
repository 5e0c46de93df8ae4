"""Routes requests to generator replicas: session-sticky first, then least loaded.

Lives in each process that samples, so that requests travel straight from there to a replica. The generator service
(in the controller) tells every router which replicas serve at present.

Invariants
    RO-1  A request that a dying replica had not answered goes on elsewhere, and its caller does not notice; only a
          request that replicas keep dying of fails, alone (`quarantine.py`).
    RO-2  With no replica to go to, requests wait for one; they never fail for that. The service's next announcement
          ends the wait, or the line to a living replica that opens again (RO-7).
    RO-3  A cancelled caller's request is cancelled at its replica too, and so is one that moves, if its replica lives.
    RO-4  An application error of a replica reaches the caller as it is and is not retried.
    RO-5  A replica is known by its name: to announce one that serves already changes nothing for it.
    RO-6  Sessions that find several replicas with the same load take them in turn, and each router begins with another.
    RO-7  A line that breaks opens again for as long as its replica is announced, after 1, 2, 4, ... seconds: only the
          service knows whether the replica died. `MOST_BREAKS` in a row without a sample end the process (PR-1).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from goaly.errors import PoisonRequest, ReplicaLost
from goaly.generate.line import Line
from goaly.generate.quarantine import POISON_DEATHS, SUSPECT_DEATHS
from goaly.generate.request import Sample, Sampling
from goaly.process import give_up

logger = logging.getLogger(__name__)

SESSIONS_REMEMBERED = 65_536

REOPEN_SECONDS = 1.0
"""A line that broke opens again after so long; after twice as long when it breaks again."""
MOST_BREAKS = 10
"""After so many in a row, eight minutes after the first, a replica that lives counts as out of reach."""


class _Replica:
    """One replica as seen from here: the line to it and the requests under way."""

    def __init__(self, name: str, line: Line):
        self.name = name
        self.line = line
        self.requests: set[str] = set()
        self.lost = False


class Router:
    """Sends each request to one of the replicas that serve at present."""

    def __init__(self, connect: Callable[[Any], Line] = Line, *, first: int = 0):
        """`connect` makes the line to a replica of this handle; `first` is the turn to begin with (RO-6)."""
        self._connect = connect
        self._turn = first
        self._handles: dict[str, Any] = {}
        self._replicas: dict[str, _Replica] = {}
        self._breaks: dict[str, int] = {}
        self._sessions: dict[str, str] = {}
        self._some_replica = asyncio.Event()

    def update(self, handles: Mapping[str, Any]) -> None:
        """Make these the serving replicas, by name; requests under way at one that is gone move to another (RO-1)."""
        for replica in [replica for name, replica in self._replicas.items() if name not in handles]:
            self._lose(replica)
        self._handles = dict(handles)
        self._breaks = {name: count for name, count in self._breaks.items() if name in handles}
        for name in handles:
            self._open(name)

    async def generate(
        self, request_id: str, tokens: list[int], sampling: Sampling, min_version: int = 0, session: str | None = None
    ) -> Sample:
        """The sample that some replica draws for this request."""
        deaths: set[str] = set()
        attempt = 0
        while True:
            replica = await self._choose(session)
            line = replica.line
            call_id = request_id if attempt == 0 else f"{request_id}.{attempt}"
            under_way = False
            replica.requests.add(call_id)
            try:
                if len(deaths) >= SUSPECT_DEATHS:
                    await line.turn(call_id)
                under_way = True
                sample = await line.ask(call_id, tokens, sampling, min_version)
                self._breaks.pop(replica.name, None)
                return sample
            except asyncio.CancelledError:
                if not replica.lost or _being_cancelled():
                    line.cancel(call_id)  # RO-3
                    raise
            except ReplicaLost as error:
                self._broke(replica, error)
            finally:
                replica.requests.discard(call_id)
            if under_way:
                deaths.add(replica.name)
            if len(deaths) >= POISON_DEATHS:
                raise PoisonRequest(
                    f"request {request_id} was under way at {len(deaths)} generator replicas as they died "
                    f"({', '.join(sorted(deaths))}), the last time as the only suspect there; it is not retried"
                )
            attempt += 1
            logger.warning("request %s moves on: %s is lost", request_id, replica.name)

    async def _choose(self, session: str | None) -> _Replica:
        while not self._replicas:
            await self._some_replica.wait()  # RO-2: `_open` sets it
        known = self._replicas.get(self._sessions.get(session, "")) if session is not None else None
        if known is not None:
            return known
        replica = self._least_loaded()
        if session is not None:
            self._remember(session, replica.name)
        return replica

    def _least_loaded(self) -> _Replica:
        replicas = list(self._replicas.values())
        count = len(replicas)
        index = min(range(count), key=lambda i: (len(replicas[i].requests), (i - self._turn) % count))  # RO-6
        self._turn = index + 1
        return replicas[index]

    def _remember(self, session: str, name: str) -> None:
        self._sessions.pop(session, None)
        self._sessions[session] = name
        if len(self._sessions) > SESSIONS_REMEMBERED:
            del self._sessions[next(iter(self._sessions))]

    def _open(self, name: str) -> None:
        if name in self._handles and name not in self._replicas:  # RO-5
            self._replicas[name] = _Replica(name, self._connect(self._handles[name]))
            self._some_replica.set()

    def _broke(self, replica: _Replica, error: ReplicaLost) -> None:
        """Have the line open again, where the service does not announce the replica's death (RO-7)."""
        if replica.lost:
            return
        self._lose(replica)
        breaks = self._breaks[replica.name] = self._breaks.get(replica.name, 0) + 1
        if breaks >= MOST_BREAKS:
            give_up(f"the line to {replica.name} broke {breaks} times in a row", error)
        asyncio.get_running_loop().call_later(REOPEN_SECONDS * 2 ** (breaks - 1), self._open, replica.name)

    def _lose(self, replica: _Replica) -> None:
        if replica.lost:
            return
        replica.lost = True
        del self._replicas[replica.name]
        replica.line.close()  # RO-3
        if not self._replicas:
            self._some_replica.clear()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

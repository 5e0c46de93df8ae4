"""Routes requests to generator replicas: session-sticky first, then least loaded.

Each process that samples has a router, so that requests travel from there to a replica directly. The generator service
(in the controller) tells every router which replicas serve.

While no replica serves, requests wait; they do not fail. A cancelled caller's request is cancelled at the replica too.
An application error of a replica reaches the caller unchanged and is not retried. Sessions that find several replicas
with the same load take them in turn, and each router starts with another. A broken connection is opened again after 1,
2, 4, ... seconds as long as its replica is announced; `MOST_BREAKS` in a row without a sample end the process
(base-1).

    generate-10: When a replica dies, the router retries its unanswered requests at other replicas; their callers do not
        notice. Only a request under which replicas keep dying fails, alone (`connection.py`). A streamed answer goes on
        after the tokens that its caller has, or fails if it cannot (generate-12).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from goaly.base.errors import PoisonRequest, ReplicaLost
from goaly.base.process import give_up
from goaly.generate.connection import POISON_DEATHS, SUSPECT_DEATHS, Connection
from goaly.generate.replica_choice import least_loaded
from goaly.generate.request import Sample, Sampling
from goaly.generate.streamed_answer import OnPart, StreamedAnswer

if TYPE_CHECKING:
    from goaly.generate.generator import Generator

logger = logging.getLogger(__name__)

SESSIONS_REMEMBERED = 65_536

REOPEN_SECONDS = 1.0
"""Pause before a broken connection is opened again. It doubles each time."""
MOST_BREAKS = 10
"""After this many in a row, eight minutes after the first, a living replica counts as unreachable."""


@dataclass(slots=True, eq=False)
class _ConnectedReplica:
    """A serving replica: the connection to it and its running requests."""

    name: str
    connection: Connection
    requests: set[str] = field(default_factory=set)
    lost: bool = False


class Router:
    """Sends each request to one of the serving replicas."""

    def __init__(self, connect: "Callable[[Generator], Connection]" = Connection, *, first: int = 0):
        """`connect` connects to the replica of a handle. Turns start with replica number `first`."""
        self._connect = connect
        self._turn = first
        self._handles: dict[str, Generator] = {}
        self._replicas: dict[str, _ConnectedReplica] = {}
        self._breaks: dict[str, int] = {}
        self._sessions: dict[str, str] = {}
        self._some_replica = asyncio.Event()

    def update(self, handles: "Mapping[str, Generator]") -> None:
        """Set the serving replicas, by name; known names stay as they are. Requests at one that is gone are retried at
        another (generate-10)."""
        for replica in [replica for name, replica in self._replicas.items() if name not in handles]:
            self._remove(replica)
        self._handles = dict(handles)
        self._breaks = {name: count for name, count in self._breaks.items() if name in handles}
        for name in handles:
            self._open(name)

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        """The sample of this request, drawn by one of the replicas. `on_part` gets its parts before; `begun_at` is as
        in `Request`."""
        answer = None if on_part is None else StreamedAnswer(request_id, on_part)
        deaths: set[str] = set()
        attempt = 0
        while True:
            replica = await self._choose(session)
            connection = replica.connection
            asked: tuple[Any, ...] = (tokens, sampling, min_version)
            if answer is not None:
                asked = answer.rest(tokens, sampling, min_version)
            call_id = request_id if attempt == 0 else f"{request_id}.{attempt}"
            submitted = False
            replica.requests.add(call_id)
            try:
                if len(deaths) >= SUSPECT_DEATHS:
                    await connection.wait_turn(call_id)
                submitted = True
                sample = await connection.submit(call_id, *asked, begun_at=begun_at)
                self._breaks.pop(replica.name, None)
                return sample if answer is None else answer.ended_by(sample)
            except asyncio.CancelledError:
                task = asyncio.current_task()  # a lost replica's connection cancels its futures, but not the task
                if not replica.lost or (task is not None and task.cancelling()):
                    connection.cancel(call_id)
                    raise
            except ReplicaLost as error:
                self._reconnect_later(replica, error)
            finally:
                replica.requests.discard(call_id)
            if submitted:
                deaths.add(replica.name)
            if len(deaths) >= POISON_DEATHS:
                raise PoisonRequest(
                    f"request {request_id} was running at {len(deaths)} generator replicas when they died "
                    f"({', '.join(sorted(deaths))}), the last time as the only suspect; it is not retried"
                )
            attempt += 1
            logger.warning("request %s is retried: replica %s is lost", request_id, replica.name)

    async def _choose(self, session: str | None) -> _ConnectedReplica:
        while not self._replicas:
            await self._some_replica.wait()  # `_open` sets it
        if session is not None and (known := self._replicas.get(self._sessions.get(session, ""))) is not None:
            return known
        replica = self._least_loaded()
        if session is not None:
            self._sessions.pop(session, None)  # it becomes the newest
            self._sessions[session] = replica.name
            if len(self._sessions) > SESSIONS_REMEMBERED:
                del self._sessions[next(iter(self._sessions))]
        return replica

    def _least_loaded(self) -> _ConnectedReplica:
        replicas = list(self._replicas.values())
        index = least_loaded([len(replica.requests) for replica in replicas], self._turn)
        self._turn = index + 1
        return replicas[index]

    def _open(self, name: str) -> None:
        if name in self._handles and name not in self._replicas:
            self._replicas[name] = _ConnectedReplica(name, self._connect(self._handles[name]))
            self._some_replica.set()

    def _reconnect_later(self, replica: _ConnectedReplica, error: ReplicaLost) -> None:
        """Open a broken connection again after a pause, unless the service announces the replica's death."""
        if replica.lost:
            return
        self._remove(replica)
        breaks = self._breaks[replica.name] = self._breaks.get(replica.name, 0) + 1
        if breaks >= MOST_BREAKS:
            give_up(f"the connection to {replica.name} broke {breaks} times in a row", error)
        asyncio.get_running_loop().call_later(REOPEN_SECONDS * 2 ** (breaks - 1), self._open, replica.name)

    def _remove(self, replica: _ConnectedReplica) -> None:
        if replica.lost:
            return
        replica.lost = True
        del self._replicas[replica.name]
        replica.connection.close()
        if not self._replicas:
            self._some_replica.clear()

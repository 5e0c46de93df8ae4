"""Routes requests to generator replicas: session-sticky first, then least loaded.

Lives in each process that samples, so that requests travel straight from there to a replica. The generator service
(in the controller) tells every router which replicas serve at present.

Invariants
    RO-1  A request that a dying replica had not answered goes on elsewhere; its caller does not notice.
    RO-2  With no replica to go to, requests wait for one; they never fail for that.
    RO-3  A cancelled caller's request is cancelled at its replica too.
    RO-4  An application error of a replica reaches the caller as it is and is not retried.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from goaly.generate.line import Line
from goaly.generate.request import Sample, Sampling

logger = logging.getLogger(__name__)

SESSIONS_REMEMBERED = 65_536


class _Replica:
    """One replica as seen from here: the line to it and the requests under way."""

    def __init__(self, handle: Any, line: Line):
        self.handle = handle
        self.line = line
        self.requests: set[str] = set()
        self.lost = False


class Router:
    """Sends each request to one of the replicas that serve at present."""

    def __init__(self, connect: Callable[[Any], Line] = Line):
        """`connect` makes the line to a replica of this handle."""
        self._connect = connect
        self._replicas: dict[int, _Replica] = {}
        self._sessions: dict[str, int] = {}
        self._some_replica = asyncio.Event()

    def update(self, handles: Mapping[int, Any]) -> None:
        """Make these the serving replicas; requests under way at one that is gone move to another (RO-1)."""
        for index in [index for index in self._replicas if index not in handles]:
            self._lose(index)
        for index, handle in handles.items():
            known = self._replicas.get(index)
            if known is None or known.handle is not handle:
                if known is not None:
                    self._lose(index)
                self._replicas[index] = _Replica(handle, self._connect(handle))
        if self._replicas:
            self._some_replica.set()
        else:
            self._some_replica.clear()

    async def generate(
        self, request_id: str, tokens: list[int], sampling: Sampling, min_version: int = 0, session: str | None = None
    ) -> Sample:
        """The sample that some replica draws for this request."""
        attempt = 0
        while True:
            index, replica = await self._choose(session)
            call_id = request_id if attempt == 0 else f"{request_id}.{attempt}"
            replica.requests.add(call_id)
            try:
                return await replica.line.ask(call_id, tokens, sampling, min_version)
            except asyncio.CancelledError:
                if not replica.lost or _being_cancelled():
                    replica.line.cancel(call_id)  # RO-3
                    raise
            except SupervisionError:
                if self._replicas.get(index) is replica:
                    self._lose(index)
            finally:
                replica.requests.discard(call_id)
            attempt += 1
            logger.warning("request %s moves on: generator replica %d is lost", request_id, index)

    async def _choose(self, session: str | None) -> tuple[int, _Replica]:
        while not self._replicas:
            await self._some_replica.wait()  # RO-2: the service's `update` sets it
        index = self._sessions.get(session) if session is not None else None
        if index is None or index not in self._replicas:
            index = min(self._replicas, key=lambda i: (len(self._replicas[i].requests), i))
            if session is not None:
                self._remember(session, index)
        return index, self._replicas[index]

    def _remember(self, session: str, index: int) -> None:
        self._sessions.pop(session, None)
        self._sessions[session] = index
        if len(self._sessions) > SESSIONS_REMEMBERED:
            del self._sessions[next(iter(self._sessions))]

    def _lose(self, index: int) -> None:
        replica = self._replicas.pop(index)
        replica.lost = True
        replica.line.close()
        if not self._replicas:
            self._some_replica.clear()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

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
from collections.abc import Mapping
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from goaly.generate.request import Sample, Sampling

logger = logging.getLogger(__name__)

SESSIONS_REMEMBERED = 65_536


class _Replica:
    """One replica as seen from here: its handle and the calls under way."""

    def __init__(self, handle: Any):
        self.handle = handle
        self.calls: set[asyncio.Future[Sample]] = set()
        self.lost = False


class Router:
    """Sends each request to one of the replicas that serve at present."""

    def __init__(self) -> None:
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
                self._replicas[index] = _Replica(handle)
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
            call = asyncio.ensure_future(
                _await(replica.handle.generate.call_one(call_id, tokens, sampling, min_version))
            )
            replica.calls.add(call)
            try:
                return await call
            except asyncio.CancelledError:
                if not replica.lost or _being_cancelled():
                    if not replica.lost:
                        replica.handle.cancel.broadcast([call_id])  # RO-3
                    raise
            except SupervisionError:
                if self._replicas.get(index) is replica:
                    self._lose(index)
            finally:
                replica.calls.discard(call)
            attempt += 1
            logger.warning("request %s moves on: generator replica %d is lost", request_id, index)

    async def _choose(self, session: str | None) -> tuple[int, _Replica]:
        while not self._replicas:
            await self._some_replica.wait()  # RO-2: the service's `update` sets it
        index = self._sessions.get(session) if session is not None else None
        if index is None or index not in self._replicas:
            index = min(self._replicas, key=lambda i: (len(self._replicas[i].calls), i))
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
        for call in list(replica.calls):
            call.cancel()
        if not self._replicas:
            self._some_replica.clear()


async def _await(call: Any) -> Any:
    return await call


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

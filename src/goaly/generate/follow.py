"""Keeps a replica at the newest policy version: prefetch while it decodes, apply between two steps.

Rank 0 waits for versions and tells its peers; a version is applied once every rank holds its part ready.

Invariants
    FO-1  Ranks apply the same versions at the same steps: each is announced to all, voted on, then sequenced by rank 0.
    FO-2  What a rank holds ready is not overwritten before its engine has applied it.
    FO-3  What rank 0 leased lasts until all ranks have copied it, and no longer: it is released after their vote.
    FO-4  A rank whose pull or link fails gives no vote: `run` raises, its process ends (GE-4), and the others with it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from goaly.errors import WritersGone
from goaly.generate.loop import EngineLoop
from goaly.generate.ranks import Link
from goaly.weights.ledger import Lease

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Versions(Protocol):
    """What is needed of `weights.subscriber.Subscriber`."""

    @property
    def held(self) -> Lease | None: ...
    async def newest(self, after: int) -> int: ...
    async def prefetch(self, version: int, lent: Lease | None = None) -> bool: ...
    async def release(self) -> None: ...
    def apply(self) -> int: ...


class WeightFollower:
    """One rank's part in following the store."""

    def __init__(self, versions: Versions, loop: EngineLoop, link: Link | None):
        self._versions = versions
        self._loop = loop
        self._link = link

    async def run(self) -> None:
        """Follow until cancelled, or until no newer weights can come."""
        if self._link is None or self._link.rank == 0:
            try:
                while True:
                    await self.catch_up()
            except WritersGone as gone:
                logger.info("the weights stay as they are: %s", gone)
                return
        while True:
            lease: Lease = await _in_thread(self._link.receive)
            if await self._hold_ready(lease.version, lease):
                await self._loop.version_at_least(lease.version)  # FO-2

    async def catch_up(self) -> bool:
        """Rank 0: wait for newer weights, have them applied on every rank; False if some rank could not get them."""
        version = await self._versions.newest(self._loop.version)
        if self._link is not None:
            await _in_thread(self._link.send, self._versions.held)
        if not await self._hold_ready(version):
            return False
        await asyncio.gather(self._versions.release(), self._loop.apply(version))  # FO-3: a drain may take long
        return True

    async def _hold_ready(self, version: int, lent: Lease | None = None) -> bool:
        ready = await self._versions.prefetch(version, lent)
        return ready if self._link is None else await _in_thread(self._link.all_agree, ready)  # FO-1


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a call that may block until the process is killed, in a thread that the process does not wait for."""
    events = asyncio.get_running_loop()
    answer: asyncio.Future[T] = events.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, result))

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (call(*arguments), None)
        except BaseException as error:
            outcome = (None, error)
        events.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="weights-link", daemon=True).start()
    return await answer

"""Keeps a replica at the newest policy version: prefetches while it decodes, applies between two steps.

Rank 0 waits for versions and sends them to the other ranks. A version is applied once every rank has prefetched its
part.

Rank 0's lease lasts until all ranks have copied the version: it is released after their vote. A rank whose pull, link
or check of the weights (weights-8) fails does not vote: `run` raises, and its process ends (generate-9). A store that
dies fails no replica if another one takes its place within `REPLACE_SECONDS`: ranks vote against the version that they
could not get, and change to the new store between two updates.

    generate-13: Ranks apply the same versions at the same steps: rank 0 sends each version to all, they vote, and rank
        0 schedules the update.
    generate-14: A rank's prefetched weights are not overwritten before its engine has applied them.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from goaly.base.actors import SupervisionError, unless
from goaly.base.errors import WritersGone
from goaly.generate.engine_loop import EngineLoop, RankLink
from goaly.weights.versions import Lease

if TYPE_CHECKING:
    from goaly.weights.subscriber import Subscriber

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPLACE_SECONDS = 600.0
"""Longest wait for the store that replaces a dead one. A rank that hears of none ends: it may have lost a store that
lives."""


class WeightFollower:
    """Follows the weight store on one rank."""

    def __init__(self, versions: "Subscriber", loop: EngineLoop, link: RankLink | None):
        self._versions = versions
        self._loop = loop
        self._link = link
        self._next: Subscriber | None = None
        self._replaced = asyncio.Event()
        self._verified_before = 0

    @property
    def verified_updates(self) -> int:
        """How many of the applied versions were verified on this rank."""
        return self._verified_before + self._versions.verified_updates

    def use(self, versions: "Subscriber") -> None:
        """Follow another store's versions from the next update on: this store has died."""
        if self._next is not None:
            self._next.drop()
        self._next = versions
        self._replaced.set()

    def apply(self) -> int:
        """Put the prefetched weights in place; their version."""
        return self._versions.apply()

    async def run(self) -> None:
        """Follow until cancelled, or until no newer weights can come."""
        try:
            while self._link is None or self._link.rank == 0:
                await self.catch_up()
        except WritersGone as gone:
            logger.info("no newer weights will come: %s", gone)
            return
        while True:
            lease: Lease = await _in_thread(self._link.receive)
            self._change_store()
            if await self._prefetch(lease.version, lease):
                await self._loop.version_at_least(lease.version)  # generate-14
                await self._versions.verify_applied()

    async def catch_up(self) -> None:
        """Rank 0: wait for newer weights and apply them on every rank, unless a rank could not get them."""
        self._change_store()
        version = await self._unless_dead(self._versions.newest(self._loop.version))
        if version is None:
            return
        if self._link is not None:
            await _in_thread(self._link.send, self._versions.held)
        if await self._prefetch(version):
            released = self._unless_dead(self._versions.release())
            await asyncio.gather(released, self._loop.apply(version))  # a drain may take long
            await self._versions.verify_applied()

    async def _prefetch(self, version: int, lent: Lease | None = None) -> bool:
        ready = await self._unless_dead(self._versions.prefetch(version, lent)) or False
        if self._link is None or not (ready := await _in_thread(self._link.all_agree, ready)):  # generate-13
            return ready
        await _in_thread(self._versions.verify_together, self._link.gathered)
        return await _in_thread(self._link.all_agree, True)  # no rank applies what another one is still verifying

    async def _unless_dead(self, call: Awaitable[T]) -> T | None:
        """The answer of a call to the store, or None if that has died and another one takes its place."""
        answered = await unless(self._replaced, call)
        if answered is not None and isinstance(died := answered.exception(), SupervisionError):
            try:
                await asyncio.wait_for(self._replaced.wait(), REPLACE_SECONDS)  # unblocked by `use`
            except TimeoutError:
                raise died from None
            return None
        return None if answered is None else answered.result()

    def _change_store(self) -> None:
        if self._next is not None:
            self._versions.drop()
            self._verified_before = self.verified_updates
            self._versions, self._next = self._next, None
            self._replaced.clear()


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a call that may block until the process is killed, in a thread that does not keep the process alive."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # from now on a cancelled caller does not cancel it

    def run() -> None:
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="weights-link", daemon=True).start()
    return await asyncio.wrap_future(answer)

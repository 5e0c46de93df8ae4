"""Stage 4 of a run as a script calls it: tickets for groups, batches for training steps, and the accounting of both."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from goaly.backlog.batch import BatchHandle
from goaly.backlog.events import Dropped, Ticket
from goaly.backlog.group_statistics import Wait
from goaly.base.actors import ask
from goaly.base.errors import RunFailed
from goaly.base.wait_reports import reporting
from goaly.journal.logged_queue import LoggedQueue
from goaly.journal.records import Drawn, Published
from goaly.journal.run_log import Recovered
from goaly.run.replaceable_actors import Lost, ReplaceableActors
from goaly.run.run_actors import Hub

T = TypeVar("T")

QUEUE_LOST = "failed: the trajectory queue was lost"


class BacklogStage:
    """Stage 4: gives out tickets and batches.

    run-6: A call whose hub dies is made again to the next one. The queue there goes on from the log, for a training
        loop that has the batches given out so far; tickets without an end are given out again, unless the run has
        closed the queue.
    """

    def __init__(
        self,
        hub: ReplaceableActors[Hub],
        on_wait: Callable[[float, Wait], Awaitable[None]] | None = None,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ):
        """`batches` calls `on_wait` when it waits for long, with the seconds waited and what it waits for, and `on_end`
        when no batch comes because the queue was closed."""
        self._hub = hub
        self._on_wait = on_wait
        self._on_end = on_end
        self.final_counts: dict[str, int] = {}
        self.final_reasons: dict[str, int] = {}
        self._admitted = 0
        self._given = self._trained = 0
        """The batches given out and trained so far."""
        self._log = Path()
        self._trainer: dict[str, Any] = {}
        self._published: list[Published] = []
        """The records of versions that may not be on disk yet: they are written again if the hub dies."""
        self._hub_of: dict[int, str] = {}
        self._is_closed = False
        self._tightened: int | None = None
        self._last_counts: dict[str, int] = {}
        self.is_giving_batches = False
        self.waited_seconds = 0.0
        """Seconds that `batches` waited for the newest batch."""

    @property
    def hub(self) -> str:
        """The name of the present hub, which tells its tickets from those of another one."""
        return self._hub.name

    async def open(self, log: Path, policy_version: int, trainer: dict[str, Any]) -> Recovered:
        """Record events in this log, and go on from where it ends with a trainer of this version and these settings."""
        self._log, self._trainer = log, trainer
        self._given = self._trained = policy_version
        return await self._ask("open", lambda queue: queue.open.call_one(log, policy_version, trainer))

    async def restore(self, hub: Hub) -> Recovered:
        """Have the queue of a hub that replaces a lost one go on from the log (run-6)."""
        call = hub.queue.open.call_one(self._log, self._trained, self._trainer, self._given, self._published)
        recovered = await ask("queue.open", call)
        if self._tightened is not None:
            await ask("queue.tighten", hub.queue.tighten.call_one(self._tightened))
        if self._is_closed:
            await ask("queue.close", hub.queue.close.call_one())
        return recovered

    def hub_of(self, ticket: int) -> str:
        """The hub that has given out this ticket; to be asked once."""
        return self._hub_of.pop(ticket, self.hub)

    def record(self, record: Drawn | Published) -> None:
        """Write a record into the log."""
        if isinstance(record, Published):
            self._published.append(record)
        self._hub.broadcast(lambda hub: hub.queue.record.broadcast(record))

    def end(self) -> None:
        """Give out no more tickets and batches, and record no more ends of tickets: a resumed run goes on from here."""
        self._is_closed = True
        self._hub.broadcast(lambda hub: hub.queue.close.broadcast())

    async def tighten(self, max_staleness: int | None) -> None:
        """Admit groups as with this staleness bound, if it is lower than that of the settings; None restores theirs."""
        self._tightened = max_staleness
        await self._ask("tighten", lambda queue: queue.tighten.call_one(max_staleness))

    async def durable(self) -> None:
        """Return when all records are on disk."""
        await self._ask("durable", lambda queue: queue.durable.call_one())

    async def tickets(self) -> AsyncIterator[Ticket]:
        """A ticket for each group, as soon as the group may start, until the run has admitted all groups it trains."""
        while (ticket := await self._ask("admit", lambda queue: queue.admit.call_one())) is not None:
            self._admitted = max(self._admitted, ticket.index + 1)
            self._hub_of[ticket.index] = self.hub
            yield ticket

    async def batches(self, steps: int) -> AsyncIterator[BatchHandle]:
        """The batches up to this step, each as soon as its groups are complete. Ends admission when it ends.

        A resumed run begins with the batches after its checkpoint, which the log has.
        """
        self.is_giving_batches = True
        while self._given < steps:
            recorded, asked = len(self._published), time.monotonic()
            async with reporting(self._report_wait):
                batch = await self._ask("next_batch", lambda queue: queue.next_batch.call_one())
            if batch is None:
                if self._on_end is not None:
                    await self._on_end()
                raise RunFailed("the trajectory queue closed before the run's last step")
            self.waited_seconds = time.monotonic() - asked
            self._given = batch.id + 1
            del self._published[:recorded]  # journal-5
            yield batch
        self.is_giving_batches = False
        if self._on_end is not None:
            await self._on_end()
        self._is_closed = True
        await self._ask("close", lambda queue: queue.close.call_one())

    async def trained(self, batch: BatchHandle, policy_version: int) -> None:
        """Record that a training step consumed this batch and made this policy version."""
        await self._ask("trained", lambda queue: queue.trained.call_one(batch.id, policy_version))
        self._trained = policy_version

    async def again(self, reader: str, first: int, end: int) -> AsyncIterator[BatchHandle]:
        """The batches from `first` on and before `end` as they were trained, for a reader that lost what it made of
        them."""
        try:
            for batch in range(first, end):
                found = await self._ask("replayed", lambda queue: queue.replayed.call_one(reader, self._log, first))
                if found is None:
                    raise RunFailed(f"the log ends before batch {batch}")
                yield found[0]
        finally:
            self._hub.broadcast(lambda hub: hub.queue.end_replay.broadcast(reader))

    async def went_back(self, served: int, newest: int) -> None:
        """The trainer, at version `newest`, has the weights of version `served` again."""
        await self._ask("went_back", lambda queue: queue.went_back.call_one(served, newest))

    async def is_running(self, ticket: int, hub: str) -> bool:
        """Whether this ticket of that hub has not ended. Those of a lost hub have: they are given out again (run-6)."""
        return await self._ask("is_running", lambda queue: queue.is_running.call_one(ticket)) and self.hub == hub

    def drop(self, ticket: int, hub: str, why: str) -> None:
        """Record that this ticket of that hub has failed, unless it has ended."""
        if self.hub == hub:
            self._hub.broadcast(lambda present: present.queue.report.broadcast(Dropped.failed(ticket, why)))

    async def counts(self) -> dict[str, int]:
        """The number of groups that were admitted, and that are in each state."""
        self._last_counts = await self._ask("counts", lambda queue: queue.counts.call_one())
        return self._last_counts

    async def close(self) -> None:
        """End the accounting. Open groups are rejected, or have failed if the queue was lost."""
        last = self._last_counts
        ended = {state: last.get(state, 0) for state in ("trained", "rejected", "failed")}
        admitted = max(self._admitted, last.get("admitted", 0))
        lost = admitted - sum(ended.values())
        self.final_counts = {"admitted": admitted, **ended, "failed": ended["failed"] + lost}
        self.final_reasons = {QUEUE_LOST: lost} if lost else {}
        self.final_counts = await self._hub.call("queue.settle", lambda hub: hub.queue.settle.call_one())
        self.final_reasons = await self._hub.call("queue.reasons", lambda hub: hub.queue.reasons.call_one())

    async def _report_wait(self, seconds: float) -> None:
        if self._on_wait is not None:
            await self._on_wait(seconds, await self._ask("wait", lambda queue: queue.wait.call_one()))

    async def _ask(self, endpoint: str, call: Callable[[LoggedQueue], Awaitable[T]]) -> T:
        while True:
            with suppress(Lost):  # run-6
                return await self._hub.call(f"queue.{endpoint}", lambda hub: call(hub.queue))

"""The queue between the collecting and the training loop: asyncio, no I/O. `trajectory_queue.py` is its actor.

Combines admission, ledger, order and batches, and lets callers wait: `admit` until a group may start, `next_batch`
until the window holds the groups of a step. Every change wakes all waiters; nothing is polled. Admission bounds every
buffer here (backlog-1), so `report` never waits. After `close` every waiter gets None, and queued groups and groups
that arrive later are rejected. A run with a known number of steps admits no more groups than it trains. A group with a
trained token older than its ticket allows is refused. With dynamic sampling a group without signal is rejected, and
another one may start in its place; when too few have a signal, every waiter gets the error.

Invariants
    backlog-6: Batch k is formed from finished groups, in the order of `order.py`, and trained by policy version k.
    backlog-7: Only `admit` and `next_batch` suspend, and neither suspends between the end of its wait and its entry in
        the ledger: a cancelled call has taken nothing.
    backlog-8: A new queue that replays another one's events or loads its state has the same state up to waiting times.
    backlog-9: `restart` admits every ticket without an end once more, and gives every batch that the training loop does
        not have (it has those before `given`) out again, in order, before a new one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from goaly.backlog.batch import Batch, BatchHandle, add_column, annotation, build_batch, check_group
from goaly.backlog.distribution import KnownStep, LengthDistribution, SourceShares
from goaly.backlog.events import Annotated, Dropped, Event, Formed, Ticket, Trained
from goaly.backlog.group_statistics import NO_SIGNAL, GroupStatistics, QueueWaits, Wait
from goaly.backlog.ledger import Ledger, State
from goaly.backlog.lessons import Taught
from goaly.backlog.order import Order
from goaly.backlog.settings import BacklogSettings
from goaly.backlog.staleness import StalenessBound
from goaly.base.errors import RunFailed
from goaly.prompts.curriculum import Passes
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group, PackedRows

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event)

RUN_ENDED = "the run ended"


class GroupQueue:
    """Admission, order, batches and accounting of one run."""

    def __init__(
        self,
        settings: BacklogSettings,
        advantage_settings: AdvantageSettings,
        *,
        dp_ranks: int,
        pad_token: int,
        steps: int | None = None,
        minibatches: int = 1,
        taught: Taught | None = None,
        record: Callable[[Event], None] = lambda event: None,
    ):
        """`record` gets each event before any caller does."""
        self._record = record
        self._settings = settings
        self._advantage_settings = advantage_settings
        self._dp_ranks = dp_ranks
        self._build_batch = partial(
            build_batch,
            settings=settings,
            advantage_settings=advantage_settings,
            dp_ranks=dp_ranks,
            pad_token=pad_token,
            minibatches=minibatches,
            taught=taught,
        )
        self._staleness = StalenessBound(settings.groups_per_step, settings.max_staleness, steps)
        self._order = Order.of(settings)
        self._ledger = Ledger()
        self._distribution = LengthDistribution(settings)
        self._statistics = GroupStatistics(settings)
        self._shares = SourceShares()
        self._signal_error: RunFailed | None = None
        self._min_versions: dict[int, int] = {}
        self.same_weights: dict[int, int] = {}  # as in `check_group`
        self._groups: dict[int, Group] = {}
        self._waits = QueueWaits()
        self._batches: dict[int, Batch] = {}
        self._admit_again: deque[Ticket] = deque()
        self._give_again: deque[int] = deque()
        self._next_batch = 0
        self._policy_version = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def known_steps(self) -> Sequence[KnownStep]:
        """The distance between trained and launched lengths of the steps for which it is known."""
        return self._distribution.known

    async def admit(self) -> Ticket | None:
        """The next ticket. Waits until a group may start; None after `close`."""
        # Unblocked by `trained`, by a dropped ticket, whose position becomes free, and by `close`.
        await self._until(
            lambda: bool(self._admit_again) or self._staleness.admits(self._ledger.live, self._policy_version)
        )
        if self._closed:
            return None
        return self._admit_again.popleft() if self._admit_again else self._recorded(self._admit())  # backlog-9

    def tighten(self, max_staleness: int | None) -> None:
        """Admit groups as with this lower staleness bound from now on; None restores that of the settings."""
        self._staleness = replace(self._staleness, tightened=max_staleness)  # backlog-14
        self._wake()

    def report(self, end: Group | Dropped) -> bool:
        """Record how a ticket's episodes ended: with a complete group, or without one. False if a group is not trained
        (its ticket or the run has ended, or it has no signal), or if a dropped ticket had ended before."""
        state = self._ledger.state(end.ticket)
        if state is not State.RUNNING:  # for example a group that ran again because its worker died as it reported
            how = f"{end.state}: {end.why}" if isinstance(end, Dropped) else "a group"
            logger.info("ticket %d is already %s; not %s", end.ticket, state, how)
            return False
        if isinstance(end, Group):
            check_group(end, self._settings, self._min_versions[end.ticket], self.same_weights)
            if self._closed:
                self._ledger.move(end.ticket, State.REJECTED, RUN_ENDED)
                return False
        self._end(end if self._closed else self._recorded(end))
        return isinstance(end, Dropped) or end.ticket in self._groups

    async def next_batch(self) -> BatchHandle | None:
        """The batch of the next step. Waits until its groups are complete; None after `close`."""
        # Unblocked by `report`, as a group is complete or no longer holds the window back, and by `close`.
        await self._until(lambda: bool(self._give_again) or self._order.ready(self._settings.groups_per_step))
        if self._closed:
            return None
        if self._give_again:
            handle, waits = self._batches[self._give_again.popleft()].handle, {}
        else:
            formed = self._recorded(self._form())
            handle, waits = self._batches[formed.batch].handle, self._waits.end(formed.tickets)
        return replace(handle, metrics=handle.metrics | waits)

    def wait(self) -> Wait:
        """The groups that the next batch is waiting for now."""
        counts = self._ledger.counts()
        return Wait(
            ticket=self._order.oldest_under_way,
            finished=self._order.finished,
            needed=self._settings.groups_per_step,
            rejected=counts[State.REJECTED],
            failed=counts[State.FAILED],
        )

    def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The rows of a batch for one data-parallel rank; available until the batch is trained."""
        batch = self._batch(batch_id)
        if not 0 <= dp_rank < self._dp_ranks:
            raise ValueError(f"dp_rank={dp_rank}: must be from 0 to {self._dp_ranks - 1}")
        return batch.ranks[dp_rank]

    def lessons(self, batch_id: int, dp_rank: int) -> PackedRows:
        """The rows that a teacher reads of a batch, for one data-parallel rank."""
        return self._batch(batch_id).lesson_rows(dp_rank)

    def annotate(self, batch_id: int, dp_rank: int, key: str, column_RL: Tensor) -> None:
        """Add a column that a later stage computed, such as `values`, to the rows of one rank."""
        annotated = annotation(self._batch(batch_id), dp_rank, key, column_RL)
        self._annotate(annotated if batch_id < self._policy_version else self._recorded(annotated))

    def trained(self, batch_id: int, policy_version: int) -> None:
        """Record that a training step consumed the batch and produced this version."""
        batch = self._batch(batch_id)
        if batch_id < self._policy_version and policy_version == batch_id + 1:  # trained again: backlog-9
            del self._batches[batch_id]
            return
        if batch_id != self._policy_version or policy_version != batch_id + 1:  # backlog-6
            raise ValueError(
                f"batch {batch_id} made policy_version={policy_version}; at version {self._policy_version} "
                f"batch {self._policy_version} is next and makes version {self._policy_version + 1}"
            )
        self._train(self._recorded(Trained(batch=batch_id, tickets=batch.tickets)))

    def replay(self, event: Event, *, keep: int | None = None) -> None:
        """Make the transition of a recorded event, by the code that made it. Batches from `keep` on are not forgotten
        when they are trained. A ValueError if this queue would have made another event (backlog-8)."""
        match event:
            case Ticket():
                made: Event = self._admit()
            case Formed():
                made = self._form()
            case Trained():
                made = self._train(event, keep=keep)
            case Annotated():
                made = self._annotate(event)
            case _:
                made = self._end(event)
        if made is not event and made != event:
            raise ValueError(f"the log has {event}, but its earlier events lead to {made}")

    def restart(self, policy_version: int, given: int | None = None) -> None:
        """Continue after a replay that kept the batches from the trainer's version on. `given`: see backlog-9."""
        while (at := self._policy_version) < policy_version:  # a step was done, but is not recorded
            if at not in self._batches:
                raise ValueError(f"the trainer is at version {policy_version}, but the log ends at {at}")
            self._train(self._recorded(Trained(batch=at, tickets=self._batches[at].tickets)))
        self.forget_signals()
        self._waits = QueueWaits()
        self._waits.begin(self._groups)
        self._admit_again.extend(Ticket(index=index, min_version=least) for index, least in self._min_versions.items())
        self._give_again.extend(batch for batch in sorted(self._batches) if given is None or batch >= given)

    def forget_signals(self) -> None:
        """Forget how many groups had no signal: a run that ended for it may go on."""
        self._signal_error = None
        self._statistics.forget()

    def state_dict(self) -> dict[str, Any] | None:
        """The state that a new queue loads (backlog-8); None while batches are trained again, and after `close`."""
        if self._closed or min(self._batches, default=self._policy_version) < self._policy_version:
            return None
        batches = self._batches.values()
        return {
            "policy_version": self._policy_version,
            "next_batch": self._next_batch,
            "running": list(self._min_versions.items()),
            **{name: part.state_dict() for name, part in self._parts().items()},
            "batches": [batch.state_dict() for batch in batches],
            "groups": [*self._groups.values(), *(group for batch in batches for group in batch.groups)],
            "annotated": [annotated for batch in batches for annotated in batch.annotated],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; this queue must be new."""
        self._policy_version, self._next_batch = state["policy_version"], state["next_batch"]
        self._min_versions = dict(state["running"])
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        groups = {group.ticket: group for group in state["groups"]}
        for saved in state["batches"]:
            passes = {source: Passes(**counts) for source, counts in saved["passes"].items()}
            of_batch = [groups.pop(ticket) for ticket in saved["tickets"]]
            batch = self._build_batch(saved["id"], of_batch, weights=saved["weights"], passes=passes)
            self._batches[saved["id"]] = batch
            metrics = batch.handle.metrics
            metrics.update({**saved["metrics"], **metrics})  # metrics of its rows are this queue's, which may differ
        self._groups = groups
        self._waits.begin(groups)
        for annotated in state["annotated"]:
            self._annotate(annotated)

    def _parts(self) -> dict[str, Any]:
        """The parts whose state is saved and loaded by themselves."""
        return {
            "order": self._order,
            "ledger": self._ledger,
            "distribution": self._distribution,
            "statistics": self._statistics,
            "sources": self._shares,
        }

    def state(self, ticket: int) -> State:
        """The state of this ticket."""
        return self._ledger.state(ticket)

    def states(self, tickets: Sequence[int]) -> list[State | None]:
        """The state of each of these tickets; None for one that was never admitted."""
        return [self._ledger.state(ticket) if ticket < self._ledger.admitted else None for ticket in tickets]

    def is_running(self, ticket: int) -> bool:
        """Whether this ticket is admitted and has not ended."""
        return ticket in self._min_versions

    def open_batches(self, first: int) -> dict[int, Batch]:
        """The batches from this one on that are in the queue."""
        return {number: batch for number, batch in self._batches.items() if number >= first}

    def handle(self, batch_id: int) -> BatchHandle:
        """The handle of a batch that is in the queue."""
        return self._batch(batch_id).handle

    def close(self) -> None:
        """End admission and batches: every waiter gets None, and complete groups that are in no batch are rejected."""
        if self._closed:
            return
        self._closed = True
        for ticket in self._ledger.open():
            if ticket in self._groups:
                self._ledger.move(ticket, State.REJECTED, RUN_ENDED)
        self._groups.clear()
        self._wake()

    def settle(self) -> dict[str, int]:
        """Close, reject every ticket that has not ended, and return the final counts."""
        self.close()
        for ticket in self._ledger.open():
            self._ledger.move(ticket, State.REJECTED, RUN_ENDED)
        return self.counts()

    def counts(self) -> dict[str, int]:
        """The number of tickets admitted and in each state, and the newest policy version."""
        return {**self._ledger.counts(), "policy_version": self._policy_version}

    def reasons(self) -> dict[str, int]:
        """The number of rejected and failed tickets by `state: why`."""
        return dict(self._ledger.reasons)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not self._closed:
            if self._signal_error is not None:
                raise self._signal_error
            if holds():
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _recorded(self, event: E) -> E:
        self._record(event)
        return event

    def _admit(self) -> Ticket:
        min_version = self._staleness.min_version(self._ledger.live)
        ticket = Ticket(index=self._ledger.admit(), min_version=min_version)
        self._order.admit(ticket.index)
        self._distribution.admit(ticket.index)
        self._min_versions[ticket.index] = min_version
        return ticket

    def _end(self, end: Group | Dropped) -> Group | Dropped:
        del self._min_versions[end.ticket]
        if isinstance(end, Dropped):
            self._statistics.count_dropped(end)
            self._drop(end)
        elif not self._statistics.count(end) and self._settings.dynamic_sampling:
            self._signal_error = self._signal_error or self._statistics.signal_error()
            self._drop(Dropped.rejected(end.ticket, NO_SIGNAL))
        else:
            self._ledger.move(end.ticket, State.QUEUED)
            self._order.finish(end.ticket)
            self._distribution.finish(end.ticket, end.trained_tokens)
            self._groups[end.ticket] = end
            self._waits.begin([end.ticket])
        self._wake()
        return end

    def _drop(self, end: Dropped) -> None:
        self._order.drop(end.ticket)
        self._distribution.drop(end.ticket)
        self._ledger.move(end.ticket, end.state, end.why)

    def _form(self) -> Formed:
        tickets = self._order.take(self._settings.groups_per_step)
        if tickets is None:
            raise ValueError(f"batch {self._next_batch}: its groups are not complete")
        groups = [self._groups.pop(ticket) for ticket in tickets]
        batch = self._build_batch(
            self._next_batch,
            groups,
            weights=self._distribution.deliver(tickets),
            passes=self._statistics.take_passes(),
        )
        self._batches[self._next_batch] = batch
        batch.handle.metrics.update(
            {
                **self._distribution.metrics(),
                **self._shares.metrics([group.source for group in groups]),
                **self._statistics.take_counts(),
                "groups/no_signal_share": self._statistics.no_signal_share,
                "groups/rejected_no_signal": float(self._ledger.reasons[f"{State.REJECTED}: {NO_SIGNAL}"]),
            }
        )
        self._next_batch += 1
        return Formed(batch=batch.handle.id, tickets=batch.tickets)

    def _annotate(self, annotated: Annotated) -> Annotated:
        batch = self._batch(annotated.batch)
        add_column(batch, annotated, self._advantage_settings)
        return annotated

    def _train(self, trained: Trained, *, keep: int | None = None) -> Trained:
        for ticket in trained.tickets:
            self._ledger.move(ticket, State.TRAINED)
        if keep is None or trained.batch < keep:
            del self._batches[trained.batch]
        self._policy_version = trained.batch + 1
        self._wake()
        return trained

    def _batch(self, batch_id: int) -> Batch:
        if batch_id not in self._batches:
            known = ", ".join(map(str, self._batches)) or "none"
            raise ValueError(f"unknown batch {batch_id}; open batches: {known}")
        return self._batches[batch_id]

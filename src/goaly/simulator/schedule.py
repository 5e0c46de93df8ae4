"""The schedule of a simulated run: the backlog's own admission, accounting, order and packing, without tokens."""

from collections import Counter
from dataclasses import dataclass, field

from goaly.backlog.group_statistics import NO_SIGNAL
from goaly.backlog.ledger import Ledger, State
from goaly.backlog.order import Order
from goaly.backlog.packing import assign, divide
from goaly.backlog.staleness import StalenessBound
from goaly.simulator.simulated_run import SimulatedRun


@dataclass(slots=True, eq=False)
class FinishedGroup:
    """A group whose episodes have ended."""

    ticket: int
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence."""
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    """Trained tokens by the policy version that sampled them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch:
    """The groups of a training step."""

    tokens: int
    rank_tokens: int
    """Tokens of the data-parallel rank that has the most."""
    ages: Counter[int]
    """Trained tokens by age."""
    queued: int
    """Finished groups that are in no batch yet."""


class Schedule:
    """Gives out tickets and forms batches as the queue of a run does (`backlog/group_queue.py`)."""

    def __init__(self, run: SimulatedRun):
        settings = run.backlog
        self._groups_per_step = settings.groups_per_step
        self._row_length = settings.row_length
        self._minibatches = run.trainer.minibatches
        self._ranks = run.trainer.fsdp
        self._bound = StalenessBound(settings.groups_per_step, settings.max_staleness, run.steps)
        self._order = Order.of(settings)
        self._ledger = Ledger()
        self._finished: dict[int, FinishedGroup] = {}
        self._batch: tuple[int, ...] = ()
        self.policy_version = 0
        self.min_versions: dict[int, int] = {}
        """The oldest version that may sample each running ticket."""

    def admit(self) -> int | None:
        """The next ticket; None if no group may start now."""
        position = self._ledger.live
        if not self._bound.admits(position, self.policy_version):
            return None
        ticket = self._ledger.admit()
        self._order.admit(ticket)
        self.min_versions[ticket] = self._bound.min_version(position)
        return ticket

    def finish(self, group: FinishedGroup) -> None:
        """Queue a complete group."""
        del self.min_versions[group.ticket]
        self._ledger.move(group.ticket, State.QUEUED)
        self._order.finish(group.ticket)
        self._finished[group.ticket] = group

    def reject(self, ticket: int) -> None:
        """Leave out a group without signal."""
        del self.min_versions[ticket]
        self._order.drop(ticket)
        self._ledger.move(ticket, State.REJECTED, NO_SIGNAL)

    def form(self) -> FormedBatch | None:
        """The next batch; None if its groups are not complete."""
        if len(self._finished) < self._groups_per_step:
            return None
        tickets = self._order.take(self._groups_per_step)
        if tickets is None:
            return None
        self._batch = tuple(tickets)
        groups = [self._finished.pop(ticket) for ticket in tickets]
        ages: Counter[int] = Counter()
        for group in groups:
            for version, tokens in group.tokens_by_version.items():
                ages[self.policy_version - version] += tokens
        return FormedBatch(
            tokens=sum(sum(group.lengths) for group in groups),
            rank_tokens=self._rank_tokens(groups),
            ages=ages,
            queued=len(self._finished),
        )

    def trained(self) -> None:
        """A step has consumed the last batch."""
        for ticket in self._batch:
            self._ledger.move(ticket, State.TRAINED)
        self.policy_version += 1

    def _rank_tokens(self, groups: list[FinishedGroup]) -> int:
        """Tokens of the busiest rank, summed over the minibatches."""
        if self._ranks == 1:
            return sum(sum(group.lengths) for group in groups)
        total = 0
        for members in divide([sum(group.lengths) for group in groups], self._minibatches):
            lengths = [length for place in members for length in groups[place].lengths]
            rows_by_rank = assign(lengths, self._row_length, self._ranks)
            total += max(sum(lengths[place] for row in rows for place in row) for rows in rows_by_rank)
        return total

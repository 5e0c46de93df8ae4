"""The events of a queue: recorded in a run's log, they rebuild the queue (`GroupQueue.replay`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from goaly.backlog.ledger import State
from goaly.trajectory import Group

CANCELLED = "cancelled"
"""The reason of a group that its script or the end of the run cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group; as an event, its admission."""

    index: int
    """Its number in the order of admission, from 0."""
    min_version: int
    """Oldest policy version that may sample any token of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The end of a ticket that is not trained."""

    ticket: int
    state: State
    """REJECTED or FAILED."""
    why: str
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of its episodes, as in `Group.counts`."""

    @classmethod
    def rejected(cls, ticket: int, why: str, counts: Mapping[str, int] | None = None) -> "Dropped":
        """The ticket is left out on purpose."""
        return cls(ticket=ticket, state=State.REJECTED, why=why, counts=counts or {})

    @classmethod
    def failed(cls, ticket: int, why: str, counts: Mapping[str, int] | None = None) -> "Dropped":
        """Something broke."""
        return cls(ticket=ticket, state=State.FAILED, why=why, counts=counts or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """A batch was formed of these tickets, in this order."""

    batch: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training step consumed a batch of these tickets, and made the policy version after it."""

    batch: int
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotated:
    """A later stage added a column to some sequences of a batch."""

    batch: int
    key: str
    places: tuple[int, ...]
    """The sequences, by their index in the batch: so the event fits any number of data-parallel ranks."""
    values_T: Tensor
    """Their values, one sequence after another."""


Event = Ticket | Group | Dropped | Formed | Annotated | Trained
"""A change of the queue's state that the events before it do not determine."""

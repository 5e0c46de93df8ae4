"""The events of a queue: recorded in a run's log, they rebuild the queue (`GroupQueue.replay`)."""

from dataclasses import dataclass

from torch import Tensor

from goaly.backlog.admission import Ticket
from goaly.backlog.ledger import Dropped
from goaly.trajectory import Group


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
"""A change of the queue's state that the events before it do not determine. A `Ticket` was admitted."""

"""The order in which finished groups reach the trainer: windowed FIFO, or completion order. Pure.

Short groups finish first. Training groups as they finish would train long ones later than they were launched, on much
older weights. By default the order of arrival therefore counts only inside a window: at most `window - 1` tickets pass
the oldest running one. `docs/schedule.md` has the proofs.

A ticket is delivered at most once, and never after it was dropped. `take` returns all the groups asked for or none, so
its result depends only on the groups finished by then. Completion order delivers tickets in the order in which they
finish.

Invariant
    backlog-4: In windowed FIFO a finished ticket i is deliverable if and only if i < head + window, where head is the
        oldest ticket neither delivered nor dropped, and the oldest deliverable ticket goes first. Hence at most
        window - 1 tickets admitted after i are delivered before i, and no ticket starves.
"""

from goaly.backlog.settings import BacklogSettings


class Order:
    """Running and finished tickets, and the order of delivery."""

    def __init__(self, window: int | None):
        """`window` is that of windowed FIFO; None is completion order."""
        if window is not None and window < 1:
            raise ValueError(f"window={window}: must be at least 1")
        self._window = window
        self._open: dict[int, bool] = {}
        """Whether each ticket has finished, in the order of admission. In completion order a ticket moves to the end
        when it finishes."""

    @classmethod
    def of(cls, settings: BacklogSettings) -> "Order":
        """The order that the settings ask for."""
        return cls(settings.window if settings.order == "windowed" else None)

    def admit(self, index: int) -> None:
        """Add a running ticket. Indices only go up."""
        assert not self._open or index > next(reversed(self._open)), f"ticket {index} admitted out of order"
        self._open[index] = False

    def finish(self, index: int) -> None:
        """Mark the group of this ticket as complete."""
        assert self._open[index] is False, f"ticket {index} finished twice"
        if self._window is None:
            del self._open[index]
        self._open[index] = True

    def drop(self, index: int) -> None:
        """Remove a ticket that will not be delivered."""
        del self._open[index]

    def ready(self, count: int) -> bool:
        """Whether `take(count)` would return tickets."""
        return self._choose(count) is not None

    def take(self, count: int) -> list[int] | None:
        """The next `count` tickets in delivery order; None if there are fewer."""
        chosen = self._choose(count)
        for index in chosen or ():
            del self._open[index]
        return chosen

    @property
    def oldest_under_way(self) -> int | None:
        """The oldest running ticket, which holds a window back; None if there is none."""
        return next((index for index, done in self._open.items() if not done), None)

    @property
    def finished(self) -> int:
        """The number of finished tickets that were not delivered yet."""
        return sum(self._open.values())

    def state_dict(self) -> list[tuple[int, bool]]:
        """The state as plain values."""
        return list(self._open.items())

    def load_state_dict(self, state: list[tuple[int, bool]]) -> None:
        """Continue from a saved state."""
        self._open = dict(state)

    def _choose(self, count: int) -> list[int] | None:
        """In one pass: tickets before the oldest running one are taken, so that one is the head of those after it."""
        chosen: list[int] = []
        head: int | None = None
        for index, done in self._open.items():
            if len(chosen) == count:
                break
            if self._window is not None and head is not None and index >= head + self._window:  # backlog-4
                return None
            if done:
                chosen.append(index)
            elif head is None:
                head = index
        return chosen if len(chosen) == count else None

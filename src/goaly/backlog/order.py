"""In which order finished groups reach the trainer: windowed FIFO. Pure.

Short groups finish first. Training them as they come would train more short groups than were launched, so the order
of arrival counts only inside a window: ahead of the oldest ticket still under way, at most `window - 1` others pass.

Invariants
    WO-1  A finished ticket i is deliverable iff i < head + window, head being the oldest ticket neither delivered nor
          dropped. Of the deliverable ones the oldest goes first.
    WO-2  A ticket is delivered at most once, and never after it was dropped.
    WO-3  At most window - 1 tickets admitted after i are delivered before i: none starves, short ones don't crowd out.
    WO-4  `take` gives all the groups asked for or none, so what it gives depends on what has finished by then only.
"""


class WindowedOrder:
    """Tickets that are under way or finished, oldest first."""

    def __init__(self, window: int):
        if window < 1:
            raise ValueError(f"window={window}: must be at least 1")
        self._window = window
        self._open: dict[int, bool] = {}  # index -> finished; insertion order is the order of admission

    def admit(self, index: int) -> None:
        """Ticket `index` is under way. Indices only go up."""
        assert not self._open or index > next(reversed(self._open)), f"ticket {index} admitted out of order"
        self._open[index] = False

    def finish(self, index: int) -> None:
        """Its group is complete."""
        assert self._open[index] is False, f"ticket {index} finished twice"
        self._open[index] = True

    def drop(self, index: int) -> None:
        """It will never be delivered."""
        del self._open[index]  # WO-2

    def ready(self, count: int) -> bool:
        """Whether `take(count)` would give them."""
        return self._choose(count) is not None

    def take(self, count: int) -> list[int] | None:
        """The next `count` tickets in delivery order, or None while the window does not hold them (WO-4)."""
        chosen = self._choose(count)
        for index in chosen or ():
            del self._open[index]
        return chosen

    def _choose(self, count: int) -> list[int] | None:
        remaining = list(self._open.items())
        chosen: list[int] = []
        while len(chosen) < count:
            if not remaining:
                return None
            limit = remaining[0][0] + self._window  # WO-1
            place = next((at for at, (index, done) in enumerate(remaining) if done and index < limit), None)
            if place is None:
                return None
            chosen.append(remaining.pop(place)[0])
        return chosen

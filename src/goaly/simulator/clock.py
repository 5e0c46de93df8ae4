"""Virtual time: calls that are made in the order of their times."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Makes each call when nothing before it is left; calls of the same time in the order in which they were asked."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._calls: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Make this call at this time."""
        self._number += 1
        heappush(self._calls, (time, self._number, call, argument))

    def after(self, seconds: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Make this call so many seconds from now, at once if it is 0."""
        if seconds > 0:
            self.at(self.now + seconds, call, argument)
        else:
            call(argument)

    def run(self, goes_on: Callable[[], bool], between: Callable[[], None]) -> None:
        """Make the calls while `goes_on` says so; `between` is called after each. RuntimeError if none is left."""
        calls = self._calls
        while goes_on():
            if not calls:
                raise RuntimeError(f"after {self.now:.3f} simulated seconds everything waits for something else")
            self.now, _, call, argument = heappop(calls)
            call(argument)
            between()

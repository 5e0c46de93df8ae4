"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is left to do.

    seconds_of_virtual_time_cost_nothing = run(coroutine())

What runs on it is ordinary asyncio code; `asyncio.sleep` is how long something takes.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Never waits: what it was to wait for has passed on return."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("every task waits for another, and no timer is set")
            self.now += max(timeout, 0.0)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, from 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of virtual time that have passed."""
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns, run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)

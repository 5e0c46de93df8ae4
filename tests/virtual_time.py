"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is left to do.

    seconds_of_virtual_time_cost_nothing = run(coroutine())

What runs on it is ordinary asyncio code; `asyncio.sleep` is how long something takes.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
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


def jumps(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """This asynchronous test, in virtual time."""

    @functools.wraps(test)
    def in_virtual_time(*arguments: P.args, **named: P.kwargs) -> T:
        return run(test(*arguments, **named))

    return in_virtual_time


async def turns(count: int = 10) -> None:
    """Let every other task run so often."""
    for _ in range(count):
        await asyncio.sleep(0)

"""A blocked event loop is noticed from outside of it."""

import logging
import subprocess
import sys
from typing import Any

import pytest

from goaly.process import FATAL, FATAL_EXIT_CODE
from goaly.rollout import watchdog
from goaly.rollout.watchdog import PARTS, LoopWatchdog

BLOCKS = """
import asyncio, logging, time
from goaly.rollout.watchdog import LoopWatchdog
logging.basicConfig()
def a_tool_that_blocks():
    time.sleep(1000)
async def main():
    LoopWatchdog(0.4).start()
    a_tool_that_blocks()
asyncio.run(main())
"""


def test_a_blocked_event_loop_ends_its_process_and_the_log_says_where_it_is_blocked() -> None:
    ended = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == FATAL_EXIT_CODE
    assert f"{FATAL}the event loop was blocked for rollout.blocked_seconds=0.4 at" in ended.stderr
    assert "in a_tool_that_blocks" in ended.stderr  # WR-2


class GaveUp(Exception):
    """Stands for the end of the process."""


class Waits:
    """Stands for `threading`: its events are never set but for the chosen ones, and waiting for one takes no time."""

    def __init__(self, answered: tuple[int, ...], stopped: int = 10_000):
        self.waited: list[float] = []
        self.asked = 0
        waits = self

        class Event:
            def __init__(self) -> None:
                self._set = False

            def set(self) -> None:
                self._set = True

            def is_set(self) -> bool:
                return self._set or len(waits.waited) >= stopped

            def wait(self, seconds: float) -> bool:
                waits.waited.append(seconds)
                return self.is_set()

        self.Event = Event
        self._answered = answered

    def call_soon_threadsafe(self, answer) -> None:
        """The loop is asked; it answers the chosen times at once."""
        self.asked += 1
        if self.asked in self._answered:
            answer()


def watched(monkeypatch: pytest.MonkeyPatch, waits: Waits) -> None:
    def give_up(why: str) -> None:
        raise GaveUp(why)

    monkeypatch.setattr(watchdog, "threading", waits)
    monkeypatch.setattr(watchdog, "give_up", give_up)
    loop: Any = waits
    LoopWatchdog(80.0)._watch(loop, 0)


def test_the_limit_is_waited_for_in_parts_and_told_when_it_has_doubled(monkeypatch, caplog):
    waits = Waits(answered=(1,))
    with pytest.raises(GaveUp, match=r"the event loop was blocked for rollout.blocked_seconds=80 at\n  nowhere"):
        watched(monkeypatch, waits)
    # a pause and the answer that came, a pause and the answer that did not: a stopped process loses a part, no more
    assert waits.waited == [10.0] * (2 + 1 + PARTS)  # LW-1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert [message.split(" at")[0] for message in caplog.messages] == [
        f"the event loop has been blocked for {seconds} s" for seconds in (10, 20, 40)
    ]


def test_a_loop_that_turns_and_a_watchdog_that_is_stopped_end_nothing(monkeypatch, caplog):
    watched(monkeypatch, Waits(answered=tuple(range(1, 20)), stopped=20))
    watched(monkeypatch, Waits(answered=(), stopped=4))
    assert len(caplog.messages) <= 2

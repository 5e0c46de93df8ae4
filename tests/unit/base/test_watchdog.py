"""A blocked event loop, and work that gets stuck, are noticed from outside of them."""

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
from torch.distributed.constants import default_pg_timeout

from goaly.base import watchdog
from goaly.base.process import FATAL, FATAL_EXIT_CODE
from goaly.base.watchdog import PARTS, LoopWatchdog, Work, WorkWatchdog, limit_work, progress
from goaly.plan.host_settings import HostSettings

STUCK = """
import asyncio, logging, threading, time
from goaly.base.watchdog import LoopWatchdog, Work, limit_work
logging.basicConfig()
def a_tool_that_blocks():
    time.sleep(1000)
async def main():
    LoopWatchdog(0.4).start()
    a_tool_that_blocks()
def a_collective():
    with Work("train"):
        time.sleep(1000)
def works():
    limit_work(0.4)
    thread = threading.Thread(target=a_collective)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("what", "says", "where"),
    [
        ("asyncio.run(main())", "the event loop has been blocked for rollout.blocked_seconds", "a_tool_that_blocks"),
        ("works()", "train has made no progress for hosts.stuck_seconds", "a_collective"),  # base-4
    ],
)
def test_what_is_stuck_ends_its_process_and_the_log_says_where(what: str, says: str, where: str) -> None:
    script = [sys.executable, "-c", STUCK + what]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == FATAL_EXIT_CODE
    assert f"{FATAL}{says}=0.4, in __main__.{where}, line " in ended.stderr
    assert f"in {where}\n" in ended.stderr  # the stack


class GaveUp(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(why: str) -> None:
        raise GaveUp(why)

    monkeypatch.setattr(watchdog, "give_up", give_up)


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
    monkeypatch.setattr(watchdog, "threading", waits)
    loop: Any = waits
    LoopWatchdog(80.0)._watch(loop, 0)


def durations(caplog: pytest.LogCaptureFixture) -> list[str]:
    """For how long, according to the log, nothing has moved."""
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return [message.partition(" for ")[2].split(" at")[0] for message in caplog.messages]


@pytest.mark.usefixtures("gives_up")
def test_the_limit_is_waited_for_in_parts_and_told_when_it_has_doubled(monkeypatch, caplog):
    waits = Waits(answered=(1,))
    with pytest.raises(GaveUp, match=r"^the event loop has been blocked for rollout.blocked_seconds=80, nowhere"):
        watched(monkeypatch, waits)
    # a pause and the answer that came, a pause and the answer that did not: a stopped process loses a part, no more
    assert waits.waited == [10.0] * (2 + 1 + PARTS)
    assert durations(caplog) == ["10 s", "20 s", "40 s", "80 s"]


@pytest.mark.usefixtures("gives_up")
def test_a_loop_that_turns_and_a_watchdog_that_is_stopped_end_nothing(monkeypatch, caplog):
    watched(monkeypatch, Waits(answered=tuple(range(1, 20)), stopped=20))
    watched(monkeypatch, Waits(answered=(), stopped=4))
    assert len(caplog.messages) <= 2


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch, gives_up: None) -> WorkWatchdog:
    """The watchdog of this process's work, which looks when a test lets it."""
    one = WorkWatchdog(80.0)
    one.is_idle = False
    monkeypatch.setattr(watchdog, "_watchdog", one)
    return one


def looks(unwatched: WorkWatchdog, count: int) -> None:
    for _ in range(count):
        unwatched.look()


def test_work_without_progress_for_the_limit_ends_its_process(unwatched: WorkWatchdog, caplog) -> None:
    with Work("train"):
        looks(unwatched, PARTS)  # it may have begun just before the first
        with pytest.raises(GaveUp, match=r"^train has made no progress for hosts.stuck_seconds=80, in .*watchdog"):
            unwatched.look()  # base-4
    assert durations(caplog) == ["10 s", "20 s", "40 s", "80 s"]
    assert "test_watchdog.py" in caplog.messages[0]


def test_work_that_ends_or_makes_progress_in_time_ends_nothing(unwatched: WorkWatchdog) -> None:
    for _ in range(PARTS):
        with Work("a step"):
            looks(unwatched, PARTS)
    with Work("a batch"):
        for _ in range(PARTS):
            looks(unwatched, PARTS)
            progress()
    progress()  # of nothing
    looks(unwatched, 2 * PARTS)
    assert unwatched.works == {}


def test_the_work_of_one_thread_does_not_hide_that_of_another(unwatched: WorkWatchdog) -> None:
    begun, ends = threading.Event(), threading.Event()

    def stuck() -> None:
        with Work("write"):
            begun.set()
            ends.wait()

    thread = threading.Thread(target=stuck)
    thread.start()
    begun.wait()
    try:
        for _ in range(PARTS):
            with Work("a step"):
                unwatched.look()
        says = r"^write has made no progress .*, in threading\.Condition\.wait, "
        with pytest.raises(GaveUp, match=says), Work("a step"):
            unwatched.look()
    finally:
        ends.set()
        thread.join()


def test_work_that_raises_has_ended(unwatched: WorkWatchdog) -> None:
    with pytest.raises(ValueError, match="broken"), Work("a step"):
        raise ValueError("broken")
    assert unwatched.works == {}


def test_the_watchdog_sleeps_while_there_is_no_work_and_does_not_exist_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, looked = threading.Semaphore(0), threading.Semaphore(0)

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            assert seconds == 10.0
            slept.release()
            looked.acquire()

    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "work watchdog"]

    monkeypatch.setattr(watchdog, "time", Clock)
    monkeypatch.setattr(watchdog, "_watchdog", None)
    before = threads()
    limit_work(80.0)
    assert threads() == before
    for _ in range(3):  # asleep, or about to be
        with Work("a step"):
            assert slept.acquire(timeout=20)
        looked.release()
    assert len(threads()) == len(before) + 1
    assert not slept.acquire(blocking=False)  # nothing begins, so it does not look


def test_without_a_limit_work_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_watchdog", None)
    limit_work(None)
    with Work("a step"):
        progress()
    assert watchdog._watchdog is None


def test_by_default_a_stuck_rank_ends_before_a_collective_of_its_peers_fails() -> None:
    """Gloo's error in a healthy rank would end the run, where the end of a process replaces its role."""
    limit = HostSettings().stuck_seconds
    assert limit is not None
    assert limit * (1 + 1 / PARTS) < default_pg_timeout.total_seconds()

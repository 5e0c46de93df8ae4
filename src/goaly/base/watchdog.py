"""Ends a process that is alive but makes no progress: its event loop is blocked, or a piece of its work does not end.

An episode that calls something synchronous stops every other episode of its worker: `LoopWatchdog` pings the event loop
from a thread of its own. A step that waits in native code, or in a collective for a rank that is stuck, waits for ever:
code that works on a thread says so, and `WorkWatchdog` looks at all pieces of work of the process.

    with Work("train"):
        …

Both log the stack of the thread while they wait, and end the process at the limit (base-1); its owner then replaces
it. Code that holds the interpreter's lock stops their threads too; the run's heartbeats detect that.

    base-4: A piece of work that makes no progress for `hosts.stuck_seconds` ends its process, after that time and
        one part more at the latest. Waiting for work is no work.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType

from goaly.base.process import give_up

logger = logging.getLogger(__name__)

PARTS = 8
"""A limit is divided into this many parts. However long a wait takes, it counts as one: time during which the whole
process was stopped does not count."""


class PartedLimit:
    """A time limit that is counted in parts."""

    def __init__(self, seconds: float, setting: str):
        """`setting` is the key that sets it."""
        self._seconds = seconds
        self._setting = setting
        self.part_seconds = seconds / PARTS

    def spend(self, parts: int, what: str, thread: int) -> None:
        """Log that `what`, in this thread, has lasted for `parts` parts, whenever that has doubled; after all of them
        end the process."""
        if parts < PARTS and parts & (parts - 1):
            return
        frame = sys._current_frames().get(thread)
        logger.warning("%s for %g s at\n%s", what, parts * self.part_seconds, _stack(frame))
        if parts >= PARTS:
            give_up(f"{what} for {self._setting}={self._seconds:g}, {_place(frame)}")


class LoopWatchdog:
    """Ends the process if the event loop in which it was started is blocked for longer than the limit."""

    def __init__(self, limit_seconds: float):
        self._limit = PartedLimit(limit_seconds, "rollout.blocked_seconds")
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running loop from now on."""
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="loop watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        part = self._limit.part_seconds
        while not self._stopped.wait(part):
            answered = threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop was closed
                return
            for waited in range(1, PARTS + 1):
                if answered.wait(part) or self._stopped.is_set():
                    break
                self._limit.spend(waited, "the event loop has been blocked", thread)


class WorkWatchdog:
    """Ends the process if a piece of its work makes no progress for longer than the limit.

    Its thread starts with the first piece of work, and sleeps while there is none."""

    def __init__(self, limit_seconds: float):
        self._limit = PartedLimit(limit_seconds, "hosts.stuck_seconds")
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="work watchdog", daemon=True)
        self._starting = threading.Lock()
        self.works: dict[int, Work] = {}
        """The present work of each thread."""
        self.is_idle = True
        """Whether a piece of work that begins has to call `wake`."""

    def wake(self) -> None:
        """Look at the work from now on, until there is none."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        self._begun.set()

    def look(self) -> None:
        """Count a part of the limit for each piece of work."""
        for thread, work in self.works.copy().items():  # a copy is made at once; threads begin and end work meanwhile
            work.looks += 1
            parts = work.looks - 1  # it began somewhere in the first
            if parts and self.works.get(thread) is work:
                self._limit.spend(parts, f"{work.name} has made no progress", thread)  # base-4

    def _watch(self) -> None:
        while True:
            self._begun.clear()
            self.is_idle = True  # before it looks: what begins after the look sees this, and calls `wake`
            if not self.works:
                self._begun.wait()
            self.is_idle = False
            while self.works:
                time.sleep(self._limit.part_seconds)
                self.look()


_watchdog: WorkWatchdog | None = None


class Work:
    """A piece of work on the present thread, which the process does not survive if it gets stuck (base-4).

    A thread has one at a time, and does not await in it.
    """

    __slots__ = ("_thread", "_watchdog", "looks", "name")

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        self._watchdog = watchdog = _watchdog
        if watchdog is not None:
            self.looks = 0
            self._thread = threading.get_ident()
            watchdog.works[self._thread] = self
            if watchdog.is_idle:
                watchdog.wake()

    def __exit__(self, *_: object) -> None:
        if self._watchdog is not None:
            del self._watchdog.works[self._thread]


def progress() -> None:
    """Begin the limit of this thread's piece of work again: a part of it is done."""
    if _watchdog is not None and (work := _watchdog.works.get(threading.get_ident())) is not None:
        work.looks = 0


def limit_work(seconds: float | None) -> None:
    """End this process from now on if a piece of its work makes no progress for so long; None is no limit."""
    global _watchdog
    _watchdog = None if seconds is None else WorkWatchdog(seconds)


def _stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  nowhere: its thread has ended"


def _place(frame: FrameType | None) -> str:
    """Where the stack ends."""
    if frame is None:
        return "nowhere: its thread has ended"
    return f"in {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}, line {frame.f_lineno}"

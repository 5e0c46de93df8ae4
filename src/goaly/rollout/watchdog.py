"""Detects that an episode blocks the event loop of its process.

An episode that calls something synchronous (`time.sleep`, a blocking client, an endless computation) stops every other
episode of its worker. A thread pings the loop. If the loop does not answer, the thread logs the stack of the loop's
thread, and at the limit it ends the process (PR-1). Code that holds the interpreter's lock stops this thread too; the
run's heartbeats detect that.

Invariants
    LW-1  Time during which the whole process was stopped does not count: the limit is divided into parts, and however
          long one wait takes it counts as one part.
"""

import asyncio
import logging
import sys
import threading
import traceback

from goaly.process import give_up

logger = logging.getLogger(__name__)

PARTS = 8
"""The limit is divided into this many parts; the loop is pinged once in each."""


class LoopWatchdog:
    """Ends the process if the event loop in which it was started is blocked for longer than the limit."""

    def __init__(self, limit_seconds: float):
        self._limit = limit_seconds
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running loop from now on."""
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="loop watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        part = self._limit / PARTS
        while not self._stopped.wait(part):
            answered = threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop was closed
                return
            for waited in range(1, PARTS + 1):
                if answered.wait(part) or self._stopped.is_set():  # LW-1
                    break
                if waited == PARTS:
                    give_up(f"the event loop was blocked for rollout.blocked_seconds={self._limit:g} {_stack(thread)}")
                if waited & (waited - 1) == 0:
                    logger.warning("the event loop has been blocked for %g s %s", waited * part, _stack(thread))


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    lines = traceback.format_stack(frame) if frame is not None else ["  nowhere: its thread has ended\n"]
    return "at\n" + "".join(lines).rstrip()

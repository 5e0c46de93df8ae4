"""How a process of a run begins and how it ends.

Invariants
    PR-1  A process whose engine, link, weight follower or thread cannot continue logs the reason and exits at once. Its
          owner notices the death and replaces the process or ends the run; nothing stays failed but alive.
    PR-2  An exception in one of goaly's own event loop callbacks does the same; in the controller it ends the run.
          Callbacks of other libraries are only logged, as by default: some raise and go on.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn

from goaly.errors import cause_of

logger = logging.getLogger(__name__)

GAVE_UP = 70
"""Exit code of a process that could not continue."""

LAST_WORDS = "cannot continue: "
"""Begins the log record of a process that ends itself; the rest of the record is the reason."""


def import_ahead(modules: Iterable[str]) -> None:
    """Import what this process will need. One that is missing is left for its user to miss.

    The garbage collector finds nothing among a million new functions and classes, but looks: importing takes a fifth
    less without it. What is imported stays to the end; frozen, the collector never looks at it again, nor then, which
    would take seconds.
    """
    atexit.register(gc.freeze)  # called after the handlers of what is imported below; vLLM's unfreezes everything
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Exit with this code, but without taking the interpreter apart: with torch in it, that takes a second and more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)


def give_up(why: str, error: BaseException | None = None) -> NoReturn:
    """Log why this process cannot continue and exit at once, from whichever thread calls (PR-1)."""
    if error is not None:
        why = f"{why}: {cause_of(error)}"
    logger.critical("%s%s", LAST_WORDS, " ".join(why.split()), exc_info=error)  # on one line: `last_words` reads one
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(GAVE_UP)  # no exit handlers: they may wait for what is broken


def give_up_when_a_thread_fails() -> None:
    """From now on an uncaught exception in any thread ends this process (PR-1)."""

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "unknown"
            give_up(f"thread {name} failed", arguments.exc_value)

    threading.excepthook = failed


def give_up_when_a_callback_fails() -> None:
    """From now on every new event loop ends this process when a callback of goaly's fails in it (PR-2). Each actor has
    a loop of its own."""

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            loop = super().new_event_loop()
            watch_callbacks(loop, give_up)
            return loop

    asyncio.set_event_loop_policy(Policy())


def watch_callbacks(loop: asyncio.AbstractEventLoop, failed: Callable[[str, BaseException], Any]) -> None:
    """Have `failed` called with what failed and its error when a callback of goaly's raises in this loop (PR-2)."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        name = _own_callback(error) if "handle" in context and error is not None else None
        if error is None or name is None:
            loop.default_exception_handler(context)
        else:
            failed(f"callback {name} failed", error)

    loop.set_exception_handler(handle)


def _own_callback(error: BaseException) -> str | None:
    """The callback of goaly's that raised this; None if it is another's."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("asyncio."):  # which called it
            return frame.f_code.co_qualname if module.startswith("goaly.") else None
    return None


def vital_task(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Run the coroutine as a task whose failure ends this process (PR-1). Cancelling it and its normal end do not."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            give_up(f"task {name} failed", error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task

"""The start and the end of a process of a run.

An exception in one of goaly's own event loop callbacks ends the process; in the controller it ends the run. An
exception in another library's callback is only logged, as by default: some libraries raise and continue.

    process-1: A process whose engine, link, weight follower or thread cannot continue logs the reason and exits at
        once. Its owner notices the death, and replaces the process or ends the run. No process stays alive after it has
        failed.
    process-2: SIGINT and SIGTERM do not end a process that the controller spawned: the controller ends it. Subprocesses
        of that process do not inherit this.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from goaly.base.errors import cause_of

logger = logging.getLogger(__name__)

FATAL_EXIT_CODE = 70
"""Exit code of a process that could not continue."""

FATAL = "cannot continue: "
"""Start of the log record of a process that gives up; the rest of the record is the reason."""


def import_ahead(modules: Iterable[str]) -> None:
    """Import these modules before they are needed. Missing modules are skipped.

    The garbage collector is off meanwhile, because it would scan a million new functions and classes and free none: the
    imports take a fifth less time. The imported objects are then frozen, so that the collector never scans them, not
    even at exit, where that would take seconds.
    """
    atexit.register(gc.freeze)  # runs after the exit handlers of these modules: vLLM's handler unfreezes everything
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        _let_torch_keep_its_operators()
    finally:
        gc.freeze()
        gc.enable()


def _let_torch_keep_its_operators() -> None:
    """At exit it would forget them one by one, in 50 to 200 ms."""
    registered: Any = vars(weakref.finalize)["_registry"]
    for finalizer in list(registered):
        if (found := finalizer.peek()) and found[1].__module__ == "torch.library":
            finalizer.atexit = False


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep what is frozen so, also if a library wants to unfreeze it: each later collection would scan all modules."""
    unfreeze, gc.unfreeze = gc.unfreeze, lambda: None
    try:
        yield
    finally:
        gc.unfreeze = unfreeze


@contextlib.contextmanager
def without_the_compiler() -> Iterator[None]:
    """Import modules whose decorators would load torch's compiler, which costs a process 1.7 s of CPU, without it.

    Their functions lose their marks for the compiler, so code that calls them must not be compiled.
    """
    from torch import compiler

    names = () if "torch._dynamo" in sys.modules else ("allow_in_graph", "assume_constant_result", "disable")
    marks = {name: getattr(compiler, name) for name in names}
    try:
        for name in marks:
            setattr(compiler, name, _unmarked)
        yield
    finally:
        for name, mark in marks.items():
            setattr(compiler, name, mark)


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    return (lambda decorated: decorated) if function is None else function


def outlive_stop_signals() -> None:
    """Let SIGINT and SIGTERM have no effect on this process from now on (process-2).

    A handler that does nothing, because subprocesses inherit ignored signals, and `Popen.terminate()` would not end
    them. A function of the C library, because Python lets only the main thread set its handlers.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    for number in (signal.SIGINT, signal.SIGTERM):
        libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))


def show_as(title: str) -> None:
    """Let `ps` and `top` show this process under a title, if the library for it is installed (vLLM brings it)."""
    os.environ["SPT_NOENV"] = "1"  # leave /proc/PID/environ as it is
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def exit_quickly(code: int) -> NoReturn:
    """Exit with this code, after the exit handlers but without the interpreter's teardown: with torch imported it takes
    a second or more."""
    atexit._run_exitfuncs()
    _exit(code)


def become(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a Python with these arguments, after the exit handlers. The process id stays."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def give_up(why: str, error: BaseException | None = None) -> NoReturn:
    """Log why this process cannot continue, and exit at once. May be called from any thread (process-1)."""
    if error is not None:
        why = f"{why}: {cause_of(error)}"
    logger.critical("%s%s", FATAL, " ".join(why.split()), exc_info=error)  # on one line: `fatal_reason` reads one line
    _exit(FATAL_EXIT_CODE)  # without exit handlers: they may wait for the failed part


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads it
            stream.flush()
    os._exit(code)


def give_up_when_a_thread_fails() -> None:
    """End this process from now on when any thread raises an uncaught exception (process-1)."""

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "unknown"
            give_up(f"thread {name} failed", arguments.exc_value)

    threading.excepthook = failed


def give_up_when_a_callback_fails() -> None:
    """End this process from now on when a callback of goaly's raises in a new event loop. Each actor has its own
    event loop."""

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            loop = super().new_event_loop()
            watch_callbacks(loop, give_up)
            return loop

    asyncio.set_event_loop_policy(Policy())


def watch_callbacks(loop: asyncio.AbstractEventLoop, failed: Callable[[str, BaseException], Any]) -> None:
    """Call `failed(name, error)` when a callback of goaly's raises in this event loop."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        name = _own_callback(error) if "handle" in context and error is not None else None
        if error is None or name is None:
            loop.default_exception_handler(context)
        else:
            failed(f"callback {name} failed", error)

    loop.set_exception_handler(handle)


def _own_callback(error: BaseException) -> str | None:
    """The name of goaly's callback that raised this error; None if another library's callback did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("asyncio."):  # asyncio calls the callback
            return frame.f_code.co_qualname if module.startswith("goaly.") else None
    return None


def vital_task(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Run the coroutine as a task whose failure ends this process (process-1). Its cancellation or end does not."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            give_up(f"task {name} failed", error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task

"""Processes: their start and end, their identity on any host, and a watch that reports the end of another one.

base-1: A process whose engine, link, weight follower or thread cannot continue logs the reason and exits at
    once. Its owner notices the death, and replaces the process or ends the run. No process stays alive after it has
    failed.
base-2: SIGINT and SIGTERM do not end a process that the controller spawned: the controller ends it. Subprocesses
    of that process do not inherit this.
base-3: A process id that was reused is not mistaken for the first process: its start time differs.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from goaly.base.errors import cause_of

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

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
    """Let SIGINT and SIGTERM have no effect on this process from now on (base-2).

    A handler that does nothing, because subprocesses inherit ignored signals, and `Popen.terminate()` would not end
    them. A function of the C library, because Python lets only the main thread set its handlers.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    for number in (signal.SIGINT, signal.SIGTERM):
        libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


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
    """Log why this process cannot continue, and exit at once. May be called from any thread (base-1)."""
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
    """End this process from now on when any thread raises an uncaught exception (base-1)."""

    def failed(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "unknown"
            give_up(f"thread {name} failed", arguments.exc_value)

    threading.excepthook = failed


def give_up_when_a_callback_fails() -> None:
    """End this process from now on when a callback of goaly's raises in a new event loop; each actor has its own. An
    exception in another library's callback is only logged, as by default: some libraries raise and continue."""

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
    """Run the coroutine as a task whose failure ends this process (base-1). Its cancellation or end does not."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            give_up(f"task {name} failed", error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


PULSE_SECONDS = 5.0
SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process, identified across hosts, boots and containers."""

    host: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid}"


def this_process(host: str | None = None) -> ProcessMark:
    """The mark of the calling process; `host` overrides its host."""
    return process_mark(os.getpid(), host)


def process_mark(pid: int, host: str | None = None) -> ProcessMark:
    """The mark of a process of this host, or of `host`."""
    return ProcessMark(host=host or this_host(), pid=pid, started=_started(pid))


def this_host() -> str:
    """The boot and the process-id namespace: processes that share both can open each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of this Unix socket is of this process's user."""
    credentials = struct.Struct("3i")  # number, user and group
    _, user, _ = credentials.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return user == os.getuid()


class ExitWatch:
    """Calls `on_exit` on the running event loop when the process has ended, or soon if it has already."""

    def __init__(self, mark: ProcessMark, on_exit: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._descriptor: int | None = None
        self._gone: asyncio.Handle | None = None
        with suppress(FileNotFoundError, ProcessLookupError):
            self._descriptor = os.pidfd_open(mark.pid)
            if _started(mark.pid) == mark.started:  # base-3: read while the descriptor pins the process
                self._loop.add_reader(self._descriptor, self._exited)
                return
        self._gone = self._loop.call_soon(self._exited)

    def _exited(self) -> None:
        self.close()
        self._on_exit()

    def beat(self) -> None:
        """Do nothing: the kernel reports the end."""

    def kill(self) -> None:
        """Kill the process, if it is still there."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching."""
        if self._gone is not None:
            self._gone.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


class SilenceWatch:
    """Calls `on_exit` on the running event loop after `seconds` without a `beat`, counted in ticks of that loop.

    A stall of the loop counts as one tick, so a process whose pulses wait in this one's queue does not count as ended.
    """

    def __init__(
        self, on_exit: Callable[[], None], seconds: float = SILENT_SECONDS, *, tick_seconds: float = PULSE_SECONDS
    ):
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._limit = math.ceil(seconds / tick_seconds)
        self._tick_seconds = tick_seconds
        self._silent = 0
        self._timer = self._loop.call_later(tick_seconds, self._tick)

    def _tick(self) -> None:
        self._silent += 1
        if self._silent >= self._limit:
            self._on_exit()
        else:
            self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def beat(self) -> None:
        """Record that the process is alive."""
        self._silent = 0

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()


Watch = ExitWatch | SilenceWatch


def watch(mark: ProcessMark, on_exit: Callable[[], None]) -> Watch:
    """A watch that calls `on_exit` once when this process, on any host, has ended, and never after `close`.

    On this host the kernel reports the end at once. A process elsewhere sends a pulse every `PULSE_SECONDS`, and counts
    as ended when it has been silent for `SILENT_SECONDS`."""
    return ExitWatch(mark, on_exit) if mark.host == this_host() else SilenceWatch(on_exit)


def is_running(mark: ProcessMark) -> bool:
    """Whether this is a process of this host that has not ended."""
    try:
        return mark.host == this_host() and _started(mark.pid) == mark.started and _stat(mark.pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process of this host; False once it has ended."""
    try:
        return _stat(pid)[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _started(pid: int) -> int:
    """Clock ticks from boot to the process's start."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The kernel's record of the process from field 3 (its state) on: the name before it may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

"""The identity of a process on any host, and a watch that reports its end.

On the watcher's own host the kernel reports the end at once. A process elsewhere sends a pulse every `PULSE_SECONDS`,
and counts as ended when it has been silent for `SILENT_SECONDS`.

`on_exit` is called once, however the process ended, and never after `close`. The watcher counts silence in ticks of its
own event loop. A stall of the watcher counts as one tick, however long it lasts: a process whose pulses wait in the
watcher's queue does not count as ended.

    liveness-1: A process id that was reused is not mistaken for the first process: its start time differs.
"""

import asyncio
import math
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
            if _started(mark.pid) == mark.started:  # liveness-1: read while the descriptor pins the process
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
    """Calls `on_exit` on the running event loop after `seconds` without a `beat`, counted in ticks."""

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
    """A watch that calls `on_exit` on the running event loop when this process, on any host, has ended."""
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

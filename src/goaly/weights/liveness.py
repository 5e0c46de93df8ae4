"""Who a process is, and the news that it ended, from the kernel and at once.

Invariants
    WP-1  A process id that was given to another process is not mistaken for the first: the time of its start differs.
    WP-2  `on_exit` is called once, however the process ended, and never after `close`.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from goaly.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process of one boot of one host."""

    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid}"


def this_process() -> ProcessMark:
    """The mark of the process that asks."""
    return process(os.getpid())


def process(pid: int) -> ProcessMark:
    """The mark of a process of this host."""
    return ProcessMark(boot=_boot(), pid=pid, started=_started(pid))


class ExitWatch:
    """Calls `on_exit` on the running event loop when the process has ended, or soon if it has already."""

    def __init__(self, mark: ProcessMark, on_exit: Callable[[], None]):
        if mark.boot != _boot():
            raise WeightsError(f"{mark} runs on another host; shared memory only reaches processes on the trainer's")
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._descriptor: int | None = None
        try:
            descriptor = os.pidfd_open(mark.pid)
        except ProcessLookupError:
            self._gone = self._loop.call_soon(on_exit)
            return
        self._descriptor = descriptor
        try:
            alive = _started(mark.pid) == mark.started  # WP-1: read while the descriptor pins the process
        except (FileNotFoundError, ProcessLookupError):
            alive = False
        if alive:
            self._loop.add_reader(descriptor, self._exited)
        else:
            self._gone = self._loop.call_soon(self._exited)

    _gone: asyncio.Handle | None = None

    def _exited(self) -> None:
        self.close()
        self._on_exit()

    def close(self) -> None:
        """Stop watching."""
        if self._gone is not None:
            self._gone.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int:
    """Clock ticks from boot to the process's start: field 22, counted after the name, which may hold anything."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

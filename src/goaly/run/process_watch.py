"""Detects that a process of a run has ended or hangs, and reports the reason.

Every process answers the controller's heartbeat in a thread of its own. Only a stopped process or one whose interpreter
is blocked does not answer; a slow step, a busy event loop or an import does not delay the answer.

The end of a process on this host is detected at once, by the kernel, as soon as the process logs to its file. Before
that, and on other hosts, Monarch's supervision reports it, up to half a minute later. (Polling it often would cost a
run on two cores a tenth of its speed.)

A process that does not answer a heartbeat for `silent_seconds`, or does not
start, is lost. On this host it is also killed. The controller counts silence in ticks of its own event loop: its own
stall or stop counts as one tick. The report of a process that gave up has its reason (`goaly.base.process`).
A process that is stopped before its first answer is lost after `silent_seconds`, if it is on this host and logs to its
file. A slow start is not lost, because the process is not stopped.
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monarch.actor import Actor, ProcMesh, endpoint

from goaly.base.errors import cause_of, first_error
from goaly.base.process import FATAL, ExitWatch, ProcessMark, is_stopped, process_mark, this_host, this_process

if TYPE_CHECKING:
    from goaly.plan.cluster import Host

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Time between two heartbeats, or less where the limit is short."""
TICKS = 10
"""The limit has at least this many ticks, so one tick lost to a stall does not matter."""
START_SECONDS = 600.0
"""A process may take this long until its first answer, whatever the limit: it imports its modules first."""
TAIL_BYTES = 1 << 16

T = TypeVar("T")


class ProcessAgent(Actor):
    """Answers for the process that it is in. Its endpoints return at once."""

    @endpoint
    def mark(self) -> ProcessMark:
        """The mark of the process."""
        return this_process()

    @endpoint
    def beat(self) -> bool:
        """The answer to a heartbeat: the process can run Python."""
        return True

    @endpoint
    def machine(self) -> "tuple[str, Host]":
        """A unique name of the machine, and its GPUs and cores."""
        from goaly.plan.cluster import this_machine

        return this_host(), this_machine()


class ProcessWatch:
    """Watches the processes of a mesh until they are lost or stopped."""

    def __init__(
        self,
        name: str,
        mesh: ProcMesh,
        *,
        logs: list[Path],
        silent_seconds: float | None,
        on_lost: Callable[[str, str], None],
    ):
        """`logs` are the processes' log files, by rank. `on_lost(name, report)` is called in this event loop."""
        self._name = name
        self._logs = logs
        self._silent_seconds = silent_seconds
        self._on_lost = on_lost
        self._exits: dict[int, ExitWatch] = {}
        self._over: set[int] = set()
        agents = mesh.spawn("agent", ProcessAgent).flatten("rank")
        self._tasks = [
            asyncio.create_task(self._watch(rank, agents.slice(rank=rank)), name=f"watch {name}.{rank}")
            for rank in range(len(logs))
        ]

    def stop_reporting(self) -> None:
        """Report nothing from now on, because the processes are being stopped."""
        self._over.update(range(len(self._logs)))
        for task in self._tasks:
            task.cancel()

    def kill(self) -> None:
        """Kill those processes of this host that are still alive, and report nothing."""
        self.stop_reporting()
        for rank in range(len(self._logs)):
            if (watch := self._exit_of(rank)) is not None:
                watch.kill()
                watch.close()

    def fatal_reasons(self) -> list[str]:
        """The reasons of the processes that gave up."""
        return [why for why in map(fatal_reason, self._logs) if why is not None]

    async def _watch(self, rank: int, agent: ProcessAgent) -> None:
        limit = self._silent_seconds
        start_limit = None if limit is None else max(START_SECONDS, limit)
        try:
            async with asyncio.TaskGroup() as start:
                watching = start.create_task(self._watch_start(rank, limit))
                mark = await answered_within(agent.mark.call_one(), start_limit)
                watching.cancel()
            if mark is None:
                self._lost(rank, f"a process has not started within {start_limit:g} s")
                return
            if mark.host == this_host():
                self._exit_of(rank, mark)
            while limit is not None:
                if await answered_within(agent.beat.call_one(), limit) is None:
                    self._lost(rank, f"{mark} has not answered for {limit:g} s (hosts.silent_seconds)")
                    return
                await asyncio.sleep(tick_of(limit))
        except Exception as error:  # the process failed, or Monarch's connection to it
            self._lost(rank, f"a process cannot be reached: {cause_of(first_error(error))}")

    async def _watch_start(self, rank: int, limit: float | None) -> None:
        """Watch for the end of the process until its first answer. It is lost after it was stopped for the limit,
        counted in ticks."""
        tick = HEARTBEAT_SECONDS if limit is None else tick_of(limit)
        stopped, child = 0, None
        while limit is None or stopped < math.ceil(limit / tick):
            await asyncio.sleep(tick)
            child = child or descendant_that_logs_to(self._logs[rank])
            if child is not None:
                self._exit_of(rank, child)
            stopped = stopped + 1 if child is not None and is_stopped(child.pid) else 0
        self._lost(rank, f"{child} has been stopped for {limit:g} s before its first answer")

    def _exit_of(self, rank: int, mark: ProcessMark | None = None) -> ExitWatch | None:
        """The watch for the end of this process; None if it has ended or is not on this host."""
        if rank not in self._exits and (mark := mark or descendant_that_logs_to(self._logs[rank])) is not None:
            self._exits[rank] = ExitWatch(mark, partial(self._lost, rank, f"{mark} ended"))
        return self._exits.get(rank)

    def _lost(self, rank: int, what: str) -> None:
        if rank in self._over:
            return
        self._over.add(rank)
        self._tasks[rank].cancel()
        if (watch := self._exit_of(rank)) is not None:
            watch.kill()
        why = fatal_reason(self._logs[rank])
        reason = "" if why is None else f": {why}"
        self._on_lost(self._name, f"{what}{reason}; its log is {self._logs[rank]}")


def tick_of(limit: float) -> float:
    """Seconds between two heartbeats, and between two checks for the answer."""
    return min(HEARTBEAT_SECONDS, limit / TICKS)


async def answered_within(answer: Awaitable[T], seconds: float | None) -> T | None:
    """The answer; None after `seconds` without one, counted in ticks of this event loop."""
    if seconds is None:
        return await answer
    call = asyncio.ensure_future(answer)
    try:
        for _ in range(math.ceil(seconds / tick_of(seconds))):
            await asyncio.wait({call}, timeout=tick_of(seconds))
            if call.done():
                return call.result()
        return None
    finally:
        call.cancel()


def descendant_that_logs_to(log: Path, pid: int | None = None) -> ProcessMark | None:
    """The process below this one, or below that with this id, that logs to this file, if there is one."""
    children: list[str] = []
    for listed in Path(f"/proc/{pid or 'self'}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += listed.read_text().split()
    for child in map(int, children):
        with contextlib.suppress(OSError):  # it has ended, or there is no log yet
            if os.path.samefile(f"/proc/{child}/fd/2", log):
                return process_mark(child)
        if (below := descendant_that_logs_to(log, child)) is not None:
            return below
    return None


def fatal_reason(log: Path) -> str | None:
    """Why the process of this log file gave up; None if it did not, or if the file cannot be read here."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    reasons = [line.partition(FATAL)[2] for line in lines if FATAL in line]
    return reasons[-1] if reasons else None

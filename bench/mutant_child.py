"""A process that runs the tests of a mutant: watched with all that it starts, and ended without a trace."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from goaly.reward.child import die_with

IDLE_SECONDS = 8.0
"""A child hangs if all its processes sleep so long without using the processor."""
TRACKER = b"multiprocessing.resource_tracker"
"""Runs in the process that removes the semaphores of the others, once they have ended."""


def become_child(parent: int) -> None:
    """Have a group of processes of its own and no output, and end with the parent."""
    os.setpgid(0, 0)
    die_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def family(group: int) -> dict[int, list[str]]:
    """The processes of this group and all below them, with the fields of their `/proc/PID/stat` from the state on."""
    fields: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    found = {pid for pid, one in fields.items() if int(one[2]) == group}
    while more := {pid for pid, one in fields.items() if int(one[1]) in found} - found:
        found |= more
    return {pid: fields[pid] for pid in found}


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that runs the tests of a mutant."""

    mutant: str
    pid: int
    anew: bool
    """Whether it imports all modules with the mutant."""
    used_ticks: int = 0
    active: float = field(default_factory=time.monotonic)
    """When it was last seen to use the processor."""

    def hangs(self) -> bool:
        """Whether it and all that it started have slept for long."""
        processes = family(self.pid).values()
        used = sum(int(ticks) for one in processes for ticks in one[11:15])
        if used != self.used_ticks or any(one[0] in "RD" for one in processes):
            self.used_ticks, self.active = used, time.monotonic()
        return time.monotonic() - self.active > IDLE_SECONDS

    def end(self) -> None:
        """Kill it and all that it started, but for what then removes their semaphores."""
        while doomed := [pid for pid, one in family(self.pid).items() if one[0] not in "ZX" and not _tracks(pid)]:
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _tracks(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False

"""The owner of a sandbox's traces on a host: a process, named so that a later one with its number differs."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int) -> str:
    """A name of a live process, which no other process of this host had or will have."""
    return f"{pid}-{_start(pid)}-{_namespace()}"


def lives(owner: str) -> bool:
    """Whether the process of an identity lives. One that this process cannot see, as in another container, counts."""
    pid, start, namespace = owner.split("-")
    return namespace != _namespace() or _start(int(pid)) == start


def _start(pid: int) -> str | None:
    """When a process began, in ticks since the boot; None if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{int(fields[18]):x}"


def _namespace() -> str:
    return f"{os.stat('/proc/self/ns/pid').st_ino:x}"

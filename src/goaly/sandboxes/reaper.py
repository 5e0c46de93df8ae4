"""This user's live sandboxes on this host, and the removal of leftovers of dead processes.

A server ends its sandboxes and removes their control groups when nobody has it any more, however that happens. Only
SIGKILL of the server leaves anything, or a power cut: control groups, and the server's folder. The groups' names have
the server's identity, and a live server answers at its folder's socket, so those of live ones stay.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from goaly.sandboxes.channel import LARGEST
from goaly.sandboxes.contract import SandboxUnavailable
from goaly.sandboxes.control_groups import PREFIX, hierarchies
from goaly.sandboxes.owner import lives
from goaly.sandboxes.server import SOCKET, alone, connected, is_live, servers_folder

END_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSandbox:
    """A sandbox of this host."""

    starter: int
    """The process that started its server."""
    pid: int
    seconds: int
    """Since its start."""
    owned: bool
    """Whether a client has it; others wait to be adopted."""
    labels: dict[str, str]


def live_sandboxes() -> list[LiveSandbox]:
    """The sandboxes of this user on this host, of whatever process; without those of servers that do not answer."""
    found = []
    for connection in filter(None, map(_connection, sorted(servers_folder().iterdir()))):
        with connection, suppress(ConnectionError):  # it ends just now
            starter = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            connection.send(b"Q" + bytes(4))
            while fields := connection.recv(LARGEST)[5:].split(b"\0")[:-1]:
                pid, seconds, owned, labels = (field.decode() for field in fields)
                one = LiveSandbox(
                    starter=starter,
                    pid=int(pid),
                    seconds=int(seconds),
                    owned=owned == "owned",
                    labels=json.loads(labels),
                )
                found.append(one)
    return found


def _connection(folder: Path) -> socket.socket | None:
    """A connection to the server with this folder, if it answers."""
    if is_live(folder):
        with suppress(SandboxUnavailable):
            return connected(folder / SOCKET)
    return None


def reap() -> list[str]:
    """Remove what sandboxes of dead processes have left on this host; the names of what was removed."""
    removed = []
    for tree in hierarchies():
        for group in sorted(tree.root.glob(f"{PREFIX}*")):
            if _left(group) and _end_group(group):
                removed.append(f"control group {group}")
    with alone():
        for folder in sorted(servers_folder().iterdir()):
            if not is_live(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(f"folder {folder}")
    return removed


def _left(group: Path) -> bool:
    """Whether a control group is that of a dead server. Names of other forms are not ours."""
    words = group.name.removeprefix(PREFIX).split("-")
    return len(words) == 5 and words[0].isdigit() and not lives("-".join(words[:3]))


def _end_group(group: Path) -> bool:
    """Kill what is still in a control group and remove it; whether it is gone."""
    with suppress(OSError):
        ended = [_kill(int(pid)) for pid in (group / "cgroup.procs").read_text().split()]
        for descriptor in filter(None, ended):
            select.select([descriptor], [], [], END_SECONDS)
            os.close(descriptor)
        group.rmdir()
        return True
    return False


def _kill(pid: int) -> int | None:
    """Kill a process; a descriptor that can be read when it has ended, None if it is not there or not visible."""
    with suppress(OSError):
        descriptor = os.pidfd_open(pid) if pid else None
        if descriptor is not None:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return descriptor
    return None

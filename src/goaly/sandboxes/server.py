"""The server of this host's sandboxes: built once, started for a run, gone with its sandboxes at its owner's end."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from goaly.sandboxes.compiler import build
from goaly.sandboxes.contract import SandboxUnavailable

SOCKET = "server"
HELLO_SECONDS = 30
ENDING = (FileNotFoundError, ConnectionResetError, ConnectionRefusedError, BrokenPipeError)
"""Errors of a server that is ending: its socket goes before the lock of its folder."""
ENDING_SECONDS = 0.01
FIRST_ID = 100_000
"""The host's user that is user 0 in every sandbox, if this process is root."""


class SandboxServer:
    """Owns a server's process: it ends, with every sandbox, when this object closes or this process ends."""

    def __init__(self) -> None:
        program = build("sandboxes")
        reader, self._owner = os.pipe()
        with alone():
            self._folder = Path(tempfile.mkdtemp(dir=servers_folder()))
            self.process = _started(program, self._folder, reader)
        self.address = self._folder / SOCKET
        os.close(reader)

    def close(self) -> None:
        """End every sandbox and the server."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
            self.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)


def _started(program: Path, folder: Path, owner: int) -> subprocess.Popen[bytes]:
    mounts = folder / "mounts"
    mounts.mkdir()
    first_id = FIRST_ID if os.geteuid() == 0 else -1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / SOCKET))
        listening.listen(128)
        words = [str(program), str(listening.fileno()), str(owner), str(mounts), str(first_id)]
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_SH)  # `is_live` looks for it: the server has it as long as it lives
        passed = [fd for fd in (listening.fileno(), owner, held) if fd >= 0]
        silent = subprocess.DEVNULL  # a server that outlives its starter holds none of its pipes
        errors = None if owner >= 0 else silent
        try:
            return subprocess.Popen(
                words, pass_fds=passed, stdin=silent, stdout=silent, stderr=errors, start_new_session=True
            )
        finally:
            os.close(held)


def is_live(folder: Path) -> bool:
    """Whether a server has this folder, however busy it is."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(held)


def connected(address: Path) -> socket.socket:
    """A connection to the server at an address."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limit = struct.pack("ll", HELLO_SECONDS, 0)  # `settimeout` would refuse to wait in a full queue
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    try:
        connection.connect(str(address))
        connection.send(b"H" + bytes(4))
        if not connection.recv(64):  # it was about to end
            raise ConnectionResetError(errno.ECONNRESET, "it has just ended")
    except OSError as error:
        connection.close()
        raise SandboxUnavailable(f"no server of sandboxes answers at {address}: {error}") from error
    return connection


def connected_to_shared(name: str) -> socket.socket:
    """A connection to the server that all processes of this user share by a name, which the first one starts.

    It ends when it has neither clients nor sandboxes. Those of a client that has gone live `seconds_unowned` longer."""
    program = build("sandboxes")
    folder = shared_folder(name)
    until = time.monotonic() + HELLO_SECONDS
    while True:
        with alone():
            if not is_live(folder):
                shutil.rmtree(folder, ignore_errors=True)  # of a server that was killed
                folder.mkdir()
                _reaped_in_background(_started(program, folder, -1))
        try:
            return connected(folder / SOCKET)
        except SandboxUnavailable as error:  # its last client may have just gone
            if is_live(folder) and not (isinstance(error.__cause__, ENDING) and time.monotonic() < until):
                raise
            time.sleep(ENDING_SECONDS)


def shared_folder(name: str) -> Path:
    """The folder of the server that processes share by this name, as long as it lives."""
    return servers_folder() / hashlib.sha256(name.encode()).hexdigest()[:16]


def _reaped_in_background(process: subprocess.Popen[bytes]) -> None:
    threading.Thread(target=process.wait, name="server of sandboxes", daemon=True).start()


@contextmanager
def alone() -> Iterator[None]:
    """While this lasts, no other process of this user starts a server or removes leftovers."""
    lock = os.open(runtime_folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def servers_folder() -> Path:
    """The folder in which each server of this user has one."""
    folder = runtime_folder() / "servers"
    folder.mkdir(exist_ok=True)
    return folder


def runtime_folder() -> Path:
    """This user's folder for sockets and locks of sandboxes on this host."""
    folder = Path(tempfile.gettempdir(), f"goaly-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SandboxUnavailable(f"{folder} must be a folder of user {os.geteuid()} that nobody else may enter")
    return folder

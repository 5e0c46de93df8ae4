"""The server of this host's sandboxes: built once, started for a run, gone with its sandboxes at its owner's end."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from goaly.sandboxes.contract import SandboxDied, SandboxError, SandboxUnavailable

NATIVE = Path(__file__).parent / "native"
LARGEST = 192 * 1024
SOCKET = "server"
HELLO_SECONDS = 30.0
FIRST_ID = 100_000
"""The host's user that is user 0 in every sandbox, if this process is root."""
Message = tuple[str, int, list[str], list[int]]


def compiler() -> list[str] | None:
    """A command that compiles C here."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def build() -> Path:
    """The server's program, compiled at the first use and kept in the user's cache."""
    sources = sorted(NATIVE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "goaly"
    program = cache / f"sandboxes-{digest}"
    if program.exists():
        return program
    command = compiler()
    if command is None:
        raise SandboxUnavailable("sandboxes need a C compiler once: install gcc or clang, or `pip install ziglang`")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder, "sandboxes")
        words = [*command, "-O2", "-o", str(made), *(str(path) for path in sources if path.suffix == ".c")]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SandboxUnavailable(f"the sandboxes' server does not compile: {done.stderr.strip()[-2000:]}")
        made.rename(program)
    return program


class Channel:
    """A socket of datagrams to the server or to a sandbox: each request has an id, and its answer has the same."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._name = name
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._next = secrets.randbits(31)  # another client's commands may still run in a sandbox that is adopted
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._receive)
        self.on_event: Callable[[Message], None] = lambda message: None
        """Called with each message that answers no request."""
        self.on_close: Callable[[], None] = lambda: None
        self.closed = False

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def expect(self, number: int) -> asyncio.Future[Message]:
        """The answer that will have this id."""
        self._answers[number] = self._loop.create_future()
        return self._answers[number]

    def send(self, op: str, number: int, *fields: str | int, fds: Sequence[int] = ()) -> None:
        data = op.encode() + struct.pack("<I", number)
        texts = [str(field) for field in fields]
        for text in texts:
            if "\0" in text:
                raise ValueError(f"a text for {self._name} has a zero byte: {text!r}")
        data += b"".join(text.encode(errors="surrogateescape") + b"\0" for text in texts)
        if len(data) > LARGEST:
            raise ValueError(f"a command has {len(data)} bytes with its variables; at most {LARGEST} fit: use a file")
        if self.closed:
            raise SandboxDied(f"{self._name} has ended")
        if self._waiting or not self._sent(data, fds):
            if not self._waiting:
                self._loop.add_writer(self._socket.fileno(), self._send_waiting)
            self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def _sent(self, data: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([data], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise SandboxDied(f"{self._name} has ended") from error
        return True

    def _send_waiting(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                if not self._sent(data, fds):
                    return
            except SandboxDied:
                return
            self._forget_waiting()
        self._loop.remove_writer(self._socket.fileno())

    def _forget_waiting(self) -> None:
        for fd in self._waiting.popleft()[1]:
            os.close(fd)

    async def ask(self, op: str, *fields: str | int, fds: Sequence[int] = (), number: int | None = None) -> Message:
        """Send a request and wait for its answer; an answer that refuses raises SandboxError."""
        number = self.new_id() if number is None else number
        answer = self.expect(number)
        try:
            self.send(op, number, *fields, fds=fds)
            message = await answer
        finally:
            self._answers.pop(number, None)
        if message[0] == "F":
            raise OSError(int(message[2][0]), message[2][1])
        if message[0] == "E":
            raise SandboxError(message[2][0])
        return message

    def _receive(self) -> None:
        while not self.closed:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, LARGEST + 5, 8)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                return
            fields = data[5:].decode(errors="surrogateescape").split("\0")[:-1]
            message = (chr(data[0]), struct.unpack_from("<I", data, 1)[0], fields, fds)
            waiting = self._answers.get(message[1])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            else:
                for fd in fds:
                    os.close(fd)
                self.on_event((message[0], message[1], fields, []))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        while self._waiting:
            self._forget_waiting()
        self._socket.close()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(SandboxDied(f"{self._name} has ended"))
                waiting.exception()  # nobody may be left who asks for it
        self.on_close()


class SandboxServer:
    """Owns a server's process: it ends, with every sandbox, when this object closes or this process ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="goaly-sandboxes-"))
        reader, self._owner = os.pipe()
        self.process = _started(self._folder, reader)
        self.address = self._folder / SOCKET
        os.close(reader)

    def close(self) -> None:
        """End every sandbox and the server."""
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
            self.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)


def _started(folder: Path, owner: int) -> subprocess.Popen[bytes]:
    program = build()
    mounts = folder / "mounts"
    mounts.mkdir()
    first_id = FIRST_ID if os.geteuid() == 0 else -1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / SOCKET))
        listening.listen(128)
        words = [str(program), str(listening.fileno()), str(owner), str(mounts), str(first_id)]
        passed = [fd for fd in (listening.fileno(), owner) if fd >= 0]
        silent = subprocess.DEVNULL  # a server that outlives its starter holds none of its pipes
        errors = None if owner >= 0 else silent
        return subprocess.Popen(
            words, pass_fds=passed, stdin=silent, stdout=silent, stderr=errors, start_new_session=True
        )


def connected(address: Path) -> socket.socket:
    """A connection to the server at an address."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(address))
        connection.settimeout(HELLO_SECONDS)
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
    folder = runtime_folder() / hashlib.sha256(name.encode()).hexdigest()[:16]
    lock = os.open(runtime_folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(SandboxUnavailable):
            return connected(folder / SOCKET)
        shutil.rmtree(folder, ignore_errors=True)  # of a server that was killed
        folder.mkdir()
        _reaped_in_background(_started(folder, -1))
        return connected(folder / SOCKET)
    finally:
        os.close(lock)


def _reaped_in_background(process: subprocess.Popen[bytes]) -> None:
    threading.Thread(target=process.wait, name="server of sandboxes", daemon=True).start()


def runtime_folder() -> Path:
    """This user's folder for sockets and locks of sandboxes on this host."""
    folder = Path(tempfile.gettempdir(), f"goaly-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SandboxUnavailable(f"{folder} must be a folder of user {os.geteuid()} that nobody else may enter")
    return folder

"""Requests to a process that runs commands, and its answers. Here they are the datagrams of a socket."""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from goaly.sandboxes.command import Inlet, Outlet, Pipe, PipeStream, Stream
from goaly.sandboxes.contract import SandboxDied, SandboxError

LARGEST = 192 * 1024
"""Bytes of the fields of one request."""
Message = tuple[str, int, list[str], list[int]]


@dataclass(slots=True)
class Ends:
    """This side of a command's pipes."""

    inputs: list[Outlet] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    outputs: list[Inlet] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    """Their descriptors, where they are pipes of this host."""

    def close(self) -> None:
        for end in (*self.inputs, *self.streams, *self.outputs):
            end.close()


class Channel(ABC):
    """Messages to and from a process: each request has an id, and its answer has the same."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._answers: dict[int, asyncio.Future[Message]] = {}
        # Another client's commands may still run in a sandbox that is adopted: numbers do not begin at 0.
        self._next = secrets.randbits(30)
        self.on_event: Callable[[Message], None] = lambda message: None
        """Called with each message that answers no request."""
        self.on_close: Callable[[], None] = lambda: None
        self.closed = False

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def expect(self, number: int) -> asyncio.Future[Message]:
        """The answer that will have this id."""
        self._answers[number] = asyncio.get_running_loop().create_future()
        return self._answers[number]

    @abstractmethod
    def begin(
        self, op: str, number: int, fields: Sequence[str | int], pipes: str, most: int, ended: asyncio.Future[int]
    ) -> Ends:
        """Send a request for a command with these pipes, a letter each: `r` the command reads it, `s` it is one of its
        streams, of which `most` bytes are kept, `w` it writes it."""

    def send(self, op: str, number: int, *fields: str | int, fds: Sequence[int] = ()) -> None:
        """Send a request."""
        self._ready()
        self._transmit(self._packed(op, number, fields), fds)

    def _ready(self) -> None:
        if self.closed:
            raise SandboxDied(f"{self.name} has ended")

    def _packed(self, op: str, number: int, fields: Sequence[str | int]) -> bytes:
        data = op.encode() + struct.pack("<I", number)
        texts = [str(field) for field in fields]
        for text in texts:
            if "\0" in text:
                raise ValueError(f"a text for {self.name} has a zero byte: {text!r}")
        data += b"".join(text.encode(errors="surrogateescape") + b"\0" for text in texts)
        if len(data) > LARGEST:
            raise ValueError(f"a command has {len(data)} bytes with its variables; at most {LARGEST} fit: use a file")
        return data

    @abstractmethod
    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        """Send a datagram, now or once the other side takes it; the descriptors are the caller's to close."""

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

    def _received(self, data: bytes, fds: list[int]) -> None:
        fields = data[5:].decode(errors="surrogateescape").split("\0")[:-1]
        message = (chr(data[0]), struct.unpack_from("<I", data, 1)[0], fields, fds)
        waiting = self._answers.get(message[1])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        else:
            for fd in fds:
                os.close(fd)
            self.on_event((message[0], message[1], fields, []))

    @abstractmethod
    def _release(self) -> None:
        """Close what carries the messages."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._release()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(SandboxDied(f"{self.name} has ended"))
                waiting.exception()  # nobody may be left who asks for it
        self.on_close()


def ends_of(fds: Sequence[int], pipes: str, most: int, ended: asyncio.Future[int]) -> Ends:
    """This side of pipes of this host, a letter each as `Channel.begin` has them."""
    ends = Ends(fds=list(fds))
    for fd, pipe in zip(fds, pipes, strict=True):
        if pipe == "s":
            ends.streams.append(PipeStream(fd, most))
        else:
            (ends.inputs if pipe == "r" else ends.outputs).append(Pipe(fd, ended))
    return ends


class SocketChannel(Channel):
    """A socket of datagrams, which carries descriptors too."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__(name)
        connection.setblocking(False)
        self._socket = connection
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._receive)

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        if self._waiting or not self._sent(data, fds):
            if not self._waiting:
                self._loop.add_writer(self._socket.fileno(), self._send_waiting)
            self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def begin(
        self, op: str, number: int, fields: Sequence[str | int], pipes: str, most: int, ended: asyncio.Future[int]
    ) -> Ends:
        ours, theirs = [], []
        for pipe in pipes:
            reader, writer = os.pipe()
            ours.append(writer if pipe == "r" else reader)
            theirs.append(reader if pipe == "r" else writer)
        ends = ends_of(ours, pipes, most, ended)
        try:
            self.send(op, number, *fields, fds=theirs)
        except BaseException:
            ends.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return ends

    def _sent(self, data: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([data], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise SandboxDied(f"{self.name} has ended") from error
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
            self._received(data, list(fds))

    def _release(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        while self._waiting:
            self._forget_waiting()
        self._socket.close()

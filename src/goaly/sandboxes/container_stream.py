"""A channel to a sandbox in a container: messages and the bytes of its pipes in one stream (`native/relay.h`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from goaly.sandboxes.channel import Channel, Ends
from goaly.sandboxes.command import CHUNK, Stream
from goaly.sandboxes.sandbox import Handler

HEAD = struct.Struct("<cII")
WINDOW = 256 * 1024
"""Most bytes of a pipe that are on their way."""


class ByteStream(Protocol):
    """The connection that carries the frames."""

    async def read(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class _End:
    """This side of a pipe or of a connection in the sandbox."""

    def __init__(self, channel: StreamChannel, number: int, command_ended: asyncio.Future[int] | None) -> None:
        self._channel = channel
        self._number = number
        self._command_ended = command_ended
        self._changed = asyncio.Event()

    def _over(self) -> bool:
        return self._command_ended is not None and self._command_ended.done()

    async def _change(self) -> None:
        """Wait until something came for this end, or its command has ended."""
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        waited = {changed, self._command_ended} if self._command_ended else {changed}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()


class RelayedInput(_End):
    """An input of a command."""

    _credit = WINDOW
    _closed = False

    def credit(self, count: int) -> None:
        """The other side has room for more bytes."""
        self._credit += count
        self._changed.set()

    def refuse(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        self._changed.set()

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._closed or self._over():
                raise BrokenPipeError
            if self._credit:
                part = view[: min(self._credit, CHUNK)]
                self._credit -= len(part)
                self._channel.frame(b"D", self._number, part)
                view = view[len(part) :]
            else:
                await self._change()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget_input(self._number)
            self._channel.frame(b"C", self._number)


class _Taken:
    """Counts bytes that were taken, and reports them in large parts."""

    def __init__(self, channel: StreamChannel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count
        if self._count >= WINDOW // 4:
            self._channel.frame(b"A", self._number, struct.pack("<I", self._count))
            self._count = 0


class RelayedStream(Stream):
    """One of the two streams of a command."""

    def __init__(self, channel: StreamChannel, number: int, most: int) -> None:
        super().__init__(most)
        self._channel = channel
        self._number = number
        self._taken = _Taken(channel, number)
        self._paused = 0
        self._pausing = False

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self._pausing:
            self._paused += len(data)
        else:
            self._taken.add(len(data))

    def pause(self) -> None:
        """Let the pipe fill, and the command wait, until `resume`."""
        self._pausing = True

    def resume(self) -> None:
        """Read again."""
        self._pausing = False
        self._taken.add(self._paused)
        self._paused = 0

    def end(self) -> None:
        """The command has closed it."""
        super().close()

    def close(self) -> None:
        if not self.closed.is_set():
            self._channel.forget_output(self._number)
            self._channel.frame(b"X", self._number)
            self.end()


class RelayedOutput(_End):
    """An output of a command beside its two streams, or the bytes of a connection."""

    def __init__(self, channel: StreamChannel, number: int, command_ended: asyncio.Future[int] | None) -> None:
        super().__init__(channel, number, command_ended)
        self._parts: deque[bytes] = deque()
        self._taken = _Taken(channel, number)
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self._parts.append(data)
        self._changed.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._changed.set()

    async def read(self) -> bytes:
        while not self._parts:
            if self._ended or self._over():
                return b""
            await self._change()
        part = self._parts.popleft()
        self._taken.add(len(part))
        return part

    def close(self) -> None:
        if not self._ended:
            self._channel.forget_output(self._number)
            self._channel.frame(b"X", self._number)
            self.end()


class RelayedPort:
    """A port inside the sandbox whose connections are handled outside, until it is closed."""

    def __init__(self, channel: StreamChannel, number: int, handler: Handler) -> None:
        self._channel = channel
        self._number = number
        self._handler = handler
        self._running: set[asyncio.Task[None]] = set()
        channel.listeners[number] = self

    def opened(self, number: int) -> None:
        """A connection has come."""
        both = self._channel.joined(number, None)
        task = asyncio.create_task(self._handle(*both))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _handle(self, outlet: RelayedInput, inlet: RelayedOutput) -> None:
        handled, carried = socket.socketpair()
        try:
            reader, writer = await asyncio.open_connection(sock=handled)
            inner_reader, inner_writer = await asyncio.open_connection(sock=carried)

            async def carry_out() -> None:
                with contextlib.suppress(OSError):
                    while data := await inlet.read():
                        inner_writer.write(data)
                        await inner_writer.drain()
                    inner_writer.write_eof()
                inlet.close()

            async def carry_in() -> None:
                with contextlib.suppress(OSError):
                    while data := await inner_reader.read(CHUNK):
                        await outlet.write(data)
                outlet.close()

            await asyncio.gather(self._handler(reader, writer), carry_out(), carry_in())
            inner_writer.close()
        finally:
            inlet.close()
            outlet.close()

    def end(self) -> None:
        """The sandbox has ended."""
        for task in self._running:
            task.cancel()

    def close(self) -> None:
        if self._channel.listeners.pop(self._number, None):
            self._channel.frame(b"C", self._number)


class StreamChannel(Channel):
    """Messages and pipes in one stream."""

    def __init__(self, stream: ByteStream, name: str) -> None:
        super().__init__(name)
        self._stream = stream
        self._inputs: dict[int, RelayedInput] = {}
        self._outputs: dict[int, RelayedStream | RelayedOutput] = {}
        self.listeners: dict[int, RelayedPort] = {}
        self.kept: tuple[int, int, Ends, asyncio.Future[int]] | None = None
        """A command of an earlier client: its number, its output's bound, its pipes, and its end."""
        self._reading = asyncio.create_task(self._read())

    def begin(
        self, op: str, number: int, fields: Sequence[str | int], pipes: str, most: int, ended: asyncio.Future[int]
    ) -> Ends:
        self._ready()
        data = self._packed(op, number, fields)
        numbers = [self.new_id() for _ in pipes]
        self.frame(b"M", numbers[0], pipes.encode() + b"\0" + data)
        return self._ends(numbers, pipes, most, ended)

    def _ends(self, numbers: Sequence[int], pipes: str, most: int, ended: asyncio.Future[int]) -> Ends:
        ends = Ends()
        for at, pipe in zip(numbers, pipes, strict=True):
            if pipe == "r":
                self._inputs[at] = RelayedInput(self, at, ended)
                ends.inputs.append(self._inputs[at])
            elif pipe == "s":
                stream = self._outputs[at] = RelayedStream(self, at, most)
                ends.streams.append(stream)
            else:
                output = self._outputs[at] = RelayedOutput(self, at, ended)
                ends.outputs.append(output)
        return ends

    async def keep(self, number: int, output_bytes: int) -> None:
        """Leave a command's pipes with the sandbox, for its next client."""
        asked, answer = self.new_id(), self.expect(self._next)
        self.frame(b"K", number, self._packed("P", asked, [f"{number} {output_bytes}"]))
        await answer

    def joined(self, number: int, ended: asyncio.Future[int] | None) -> tuple[RelayedInput, RelayedOutput]:
        """Both directions of a connection."""
        outlet, inlet = RelayedInput(self, number, ended), RelayedOutput(self, number, ended)
        self._inputs[number], self._outputs[number] = outlet, inlet
        return outlet, inlet

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        assert not fds, "descriptors do not leave this host"
        self.frame(b"M", 0, b"\0" + data)

    def frame(self, kind: bytes, number: int, data: bytes | memoryview = b"") -> None:
        """Send a frame; none is sent once the sandbox has ended."""
        if not self.closed:
            self._stream.write(HEAD.pack(kind, number, len(data)) + data)

    def forget_input(self, number: int) -> None:
        self._inputs.pop(number, None)

    def forget_output(self, number: int) -> None:
        self._outputs.pop(number, None)

    async def _read(self) -> None:
        held = bytearray()
        try:
            while data := await self._stream.read():
                held += data
                at = 0
                while len(held) - at >= HEAD.size:
                    kind, number, length = HEAD.unpack_from(held, at)
                    if len(held) - at - HEAD.size < length:
                        break
                    at += HEAD.size + length
                    self._frame_came(kind, number, bytes(held[at - length : at]))
                del held[:at]
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # the sandbox or its daemon has ended, which all who wait learn next
        finally:
            self.close()

    def _frame_came(self, kind: bytes, number: int, data: bytes) -> None:
        if kind == b"M":
            self._received(data, [])
        elif kind == b"D" and (output := self._outputs.get(number)):
            output.feed(data)
        elif kind == b"C" and (output := self._outputs.pop(number, None)):
            output.end()
        elif kind == b"X" and (input_ := self._inputs.pop(number, None)):
            input_.refuse()
        elif kind == b"A" and (input_ := self._inputs.get(number)):
            input_.credit(*struct.unpack("<I", data))
        elif kind == b"P":
            said, pipes, _ = data.decode().split("\0")
            command, most = map(int, said.split())
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.kept = (command, most, self._ends(range(number, number + len(pipes)), pipes, most, ended), ended)
        elif kind == b"O" and (listener := self.listeners.get(number)):
            listener.opened(*struct.unpack("<I", data))

    def _release(self) -> None:
        self._stream.close()
        self._reading.cancel()
        for input_ in self._inputs.values():
            input_.refuse()
        for output in self._outputs.values():
            output.end()
        for listener in self.listeners.values():
            listener.end()
        self._inputs.clear()
        self._outputs.clear()
        self.listeners.clear()

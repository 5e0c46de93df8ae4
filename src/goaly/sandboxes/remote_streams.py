"""The pipes of commands and connections over a wire, at both of its sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress

from goaly.sandboxes.process import Inlet, Stream
from goaly.sandboxes.remote_wire import PART, WireCall


def in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of a good size for the wire, none of them empty."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


async def send_all(call: WireCall, pieces: Iterable[bytes]) -> None:
    """Send these bytes and their end on pipe 0, unless nobody reads them."""
    with suppress(BrokenPipeError):
        for part in in_parts(pieces):
            await call.send(0, part)
        call.end(0)


class RemoteStream(Stream):
    """An output of a command that comes over a wire."""

    def __init__(self, call: WireCall, pipe: int, most: int) -> None:
        super().__init__(most)
        self._call = call
        self._pipe = pipe
        call.takers[pipe] = self.feed

    def close(self) -> None:
        if not self.closed.is_set():
            self._call.refuse(self._pipe)
            super().close()


class RemoteOutlet:
    """What a command at the other side reads."""

    def __init__(self, call: WireCall, pipe: int) -> None:
        self._call = call
        self._pipe = pipe

    async def write(self, data: bytes) -> None:
        if data:
            await self._call.send(self._pipe, data)

    def close(self) -> None:
        self._call.end(self._pipe)


class RemoteInlet:
    """What a command at the other side writes beside its two streams."""

    def __init__(self, call: WireCall, pipe: int) -> None:
        self._call = call
        self._pipe = pipe

    async def read(self) -> bytes:
        return await self._call.receive(self._pipe)

    def close(self) -> None:
        self._call.refuse(self._pipe)


class StreamForwarder:
    """Sends an output of a command over a wire as fast as its reader reads; meanwhile the command waits (remote-1)."""

    def __init__(self, stream: Stream, call: WireCall, pipe: int) -> None:
        self._stream = stream
        self._call = call
        self._pipe = pipe
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        stream.on_bytes = self._take

    def _take(self, data: bytes) -> None:
        self._parts.put_nowait(data)
        self._stream.pause()

    async def run(self) -> None:
        """Forward until cancelled."""
        while True:
            data = await self._parts.get()
            try:
                await self._call.send(self._pipe, data)
            except BrokenPipeError:
                self._stream.close()  # as a pipe that nobody reads
            self._parts.task_done()
            if self._parts.empty():
                self._stream.resume()

    async def flush(self) -> None:
        """Wait until all that the command has written by now is sent."""
        self._stream.drain()
        await self._parts.join()


async def forward_input(
    call: WireCall, pipe: int, write: Callable[[bytes], Awaitable[None]], close: Callable[[], None]
) -> None:
    """Give a command what comes for it, until the end."""
    try:
        async for data in call.bytes_of(pipe):
            await write(data)
    except BrokenPipeError:
        call.refuse(pipe)
    close()


async def forward_output(inlet: Inlet, call: WireCall, pipe: int, before: Iterable[StreamForwarder]) -> None:
    """Send what a command writes beside its two streams, each part after what it wrote to them before."""
    with suppress(BrokenPipeError):
        while data := await inlet.read():
            for forwarder in before:
                await forwarder.flush()
            await call.send(pipe, data)
    call.end(pipe)


async def copy_in(call: WireCall, writer: asyncio.StreamWriter) -> None:
    """Write what comes on a call to a connection, until its end."""
    with suppress(OSError):
        async for data in call.bytes_of(0):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def copy_out(reader: asyncio.StreamReader, call: WireCall) -> None:
    """Send what comes on a connection, until its end."""
    with suppress(OSError):
        while data := await reader.read(PART):
            await call.send(0, data)
        call.end(0)

"""The pipes of commands and connections over a wire, at both of its sides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress

from goaly.sandboxes.command import Stream
from goaly.sandboxes.remote_wire import PART, WireCall


def in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of a good size for the wire, none of them empty."""
    small = bytearray()
    for piece in pieces:
        if small and len(small) + len(piece) > PART:
            yield bytes(small)
            small.clear()
        if len(piece) < PART:
            small += piece
        else:
            yield from (piece[at : at + PART] for at in range(0, len(piece), PART))
    if small:
        yield bytes(small)


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
    """An input of a command at the other side."""

    def __init__(self, call: WireCall, pipe: int) -> None:
        self._call = call
        self._pipe = pipe

    async def write(self, data: bytes) -> None:
        if data:
            await self._call.send(self._pipe, data)

    def close(self) -> None:
        self._call.end(self._pipe)


class RemoteInlet:
    """An output of a command at the other side beside its two streams."""

    def __init__(self, call: WireCall, pipe: int) -> None:
        self._call = call
        self._pipe = pipe

    async def read(self) -> bytes:
        return await self._call.receive(self._pipe)

    def close(self) -> None:
        self._call.refuse(self._pipe)


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

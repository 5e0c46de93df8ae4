"""Calls over one WebSocket, alike in both directions: a request, numbered pipes of bytes both ways, one answer.

remote-1: Nobody sends more bytes on a pipe than its reader has room for, and nobody queues more than the connection
    takes: output without end fills neither side's memory.
remote-2: A call whose caller is cancelled is cancelled at the other side, and the caller waits until that has ended it.
remote-3: A connection over which nothing comes for its silent seconds is lost, and every call on it fails at once.

A frame is a kind, the number of a call, a pipe of the call, and bytes.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self

from goaly.sandboxes.contract import SandboxDied
from goaly.sandboxes.remote_errors import error_of, fields_of

HEAD = struct.Struct("<cIB")
SIZE = struct.Struct("<I")
PART = 1 << 16
"""Most bytes of a pipe in one frame."""
WINDOW = 1 << 18
"""Most bytes of a pipe that are on their way or wait for their reader."""
MOST_QUEUED = 1 << 20
"""Bytes that wait for the connection before pipes have to."""
TICKS = 6
"""Ticks in the limit of silence: a stall of this process itself counts as one."""
REQUEST, ANSWER, ERROR, CANCEL, DATA, ROOM, NOTICE, PING, PONG = (bytes([letter]) for letter in b"QAECDRNPO")
READY = 255
"""The pipe on which the other side says that a long call has begun."""


class BinarySocket(Protocol):
    """A WebSocket."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes | None:
        """The next message; None at the end."""
        ...

    def abort(self) -> None:
        """End it without a farewell."""


class Answer(NamedTuple):
    """The answer of a call."""

    fields: Mapping[str, Any]
    blob: bytes = b""


Serve = Callable[["WireCall"], Coroutine[Any, Any, Answer]]


class WireCall:
    """One call, at the side that made it or at the one that serves it."""

    def __init__(self, wire: Wire, number: int, op: str, fields: Mapping[str, Any], blob: bytes = b"") -> None:
        self.number = number
        self.op = op
        self.fields = fields
        self.blob = blob
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.takers: dict[int, Callable[[bytes], None]] = {}
        """A taker of a pipe's bytes as they come; those of others wait for `receive`."""
        self._wire = wire
        self._changed = asyncio.Event()
        self._room: dict[int, int] = defaultdict(lambda: WINDOW)
        self._unread: dict[int, int] = defaultdict(int)
        self._parts: dict[int, deque[bytes]] = defaultdict(deque)
        self._refused: set[int] = set()

    async def send(self, pipe: int, data: bytes) -> None:
        """Send as fast as the reader reads; BrokenPipeError if nobody reads any more. No data is the end.

        Of data that fits into one part, a caller that is cancelled has sent nothing."""
        view = memoryview(data)
        while True:
            part = view[:PART]
            await self._wire.uncongested()
            while not self.answer.done() and pipe not in self._refused and self._room[pipe] < len(part):
                await self._change()
            if self.answer.done() or pipe in self._refused:
                raise BrokenPipeError
            self._room[pipe] -= len(part)
            self._wire.post(DATA, self.number, pipe, part)
            view = view[len(part) :]
            if not view:
                return

    def end(self, pipe: int) -> None:
        """Nothing more follows on a pipe."""
        if not self.answer.done():
            self._wire.post(DATA, self.number, pipe)

    def refuse(self, pipe: int) -> None:
        """Nobody reads a pipe any more."""
        self.takers[pipe] = lambda data: None
        if not self.answer.done():
            self._wire.post(ROOM, self.number, pipe, SIZE.pack(0))

    async def receive(self, pipe: int) -> bytes:
        """The next bytes; none at the end. An error if the call failed."""
        while not self._parts[pipe]:
            if self.answer.done():
                self.answer.result()
                return b""
            await self._change()
        data = self._parts[pipe].popleft()
        if not data:
            self._parts[pipe].append(data)  # the end stays
        self._read(pipe, len(data))
        return data

    async def bytes_of(self, pipe: int) -> AsyncIterator[bytes]:
        """All that comes on a pipe."""
        while data := await self.receive(pipe):
            yield data

    async def result(self) -> Answer:
        """The answer, or the call's error."""
        return await asyncio.shield(self.answer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """A call that is left before its answer is ended by the other side before this returns (remote-2)."""
        if not self.answer.done():
            self.cancel()
            await asyncio.wait({self.answer})  # unblocked by the answer, or by silence

    def cancel(self) -> None:
        """Ask the other side to end it."""
        if not self.answer.done():
            self._wire.post(CANCEL, self.number)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _read(self, pipe: int, count: int) -> None:
        self._unread[pipe] += count
        if self._unread[pipe] >= WINDOW // 2 and not self.answer.done():
            self._wire.post(ROOM, self.number, pipe, SIZE.pack(self._unread[pipe]))
            self._unread[pipe] = 0

    def arrived(self, pipe: int, data: bytes) -> None:
        """Bytes of a pipe came."""
        if taker := self.takers.get(pipe):
            taker(data)
            self._read(pipe, len(data))
            return
        if self._unread[pipe] + sum(map(len, self._parts[pipe])) + len(data) > 2 * WINDOW:
            raise ValueError(f"more than {WINDOW} bytes came on a pipe that nobody reads")
        self._parts[pipe].append(data)
        self._changed.set()

    def given_room(self, pipe: int, count: int) -> None:
        """The reader of a pipe has room for more, or with 0 is gone."""
        if count:
            self._room[pipe] += count
        else:
            self._refused.add(pipe)
        self._changed.set()

    def ended(self, outcome: Answer | Exception) -> None:
        """It has its answer."""
        if not self.answer.done():
            if isinstance(outcome, Exception):
                self.answer.set_exception(outcome)
                self.answer.exception()  # nobody may be left who asks for it
            else:
                self.answer.set_result(outcome)
        self._changed.set()


class Wire:
    """One connection. `run` serves it until it is lost."""

    def __init__(self, socket: BinarySocket, serve: Serve, *, name: str, silent_seconds: float, server: bool) -> None:
        self.name = name
        """The other side, in errors."""
        self.lost: str | None = None
        """Why it is lost; None while it is not."""
        self.on_notice: Callable[[Mapping[str, Any]], None] = lambda fields: None
        self.on_lost: Callable[[str], None] = lambda why: None
        self._socket = socket
        self._serve = serve
        self._tick_seconds = silent_seconds / TICKS
        self._silent_ticks = 0
        self._silent = f"{name} has not answered for {silent_seconds:g} s"
        self._next = 0 if server else 1
        self._calls: dict[int, WireCall] = {}
        self._served: dict[int, tuple[WireCall, asyncio.Task[Answer]]] = {}
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def call(self, op: str, blob: bytes = b"", /, **fields: Any) -> WireCall:
        """Begin a call; SandboxDied if the connection is lost."""
        if self.lost is not None:
            raise SandboxDied(self.lost)
        self._next += 2
        call = self._calls[self._next] = WireCall(self, self._next, op, fields)
        self.post(REQUEST, call.number, 0, _packed({**fields, "op": op}, blob))
        return call

    async def ask(self, op: str, blob: bytes = b"", /, **fields: Any) -> Answer:
        """Make a call and wait for its answer; its error, or SandboxDied if the connection is lost."""
        async with self.call(op, blob, **fields) as call:
            return await call.result()

    def notify(self, **fields: Any) -> None:
        """Tell the other side something."""
        self.post(NOTICE, 0, 0, _packed(fields))

    def post(self, kind: bytes, number: int = 0, pipe: int = 0, data: bytes | memoryview = b"") -> None:
        """Queue a frame."""
        if self.lost is None:
            self._queue.append(HEAD.pack(kind, number, pipe) + data)
            self._queued += len(data) + HEAD.size
            self._changed.set()

    async def uncongested(self) -> None:
        """Wait until few bytes wait for the connection (remote-1)."""
        while self._queued > MOST_QUEUED and self.lost is None:
            self._sent.clear()
            await self._sent.wait()

    async def run(self) -> None:
        """Read and write until the connection is lost. Calls that are served are cancelled then, and have ended."""
        writing = asyncio.ensure_future(self._write())
        self._ticking = self._loop.call_later(self._tick_seconds, self._tick)
        try:
            while self.lost is None and (data := await self._socket.receive()) is not None:
                self._silent_ticks = 0
                self._arrived(data)
        except (OSError, ValueError, struct.error, LookupError) as error:
            self.lose(f"{self.name} was lost: {error}")
        finally:
            self.lose(f"{self.name} has closed the connection")
            self._ticking.cancel()
            writing.cancel()
            tasks = [task for _, task in self._served.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def lose(self, why: str) -> None:
        """Close the connection: every call on it fails."""
        if self.lost is not None:
            return
        self.lost = why
        self._socket.abort()
        self._queue.clear()
        self._changed.set()
        self._sent.set()
        for call in [*self._calls.values(), *(call for call, _ in self._served.values())]:
            call.ended(SandboxDied(why))
        self._calls.clear()
        self.on_lost(why)

    def _tick(self) -> None:
        self._silent_ticks += 1
        if self._silent_ticks > TICKS:
            self.lose(self._silent)  # remote-3
        else:
            self.post(PING)
            self._ticking = self._loop.call_later(self._tick_seconds, self._tick)

    async def _write(self) -> None:
        with suppress(OSError):
            while self.lost is None:
                self._changed.clear()
                while self._queue:
                    frame = self._queue.popleft()
                    await self._socket.send(frame)
                    self._queued -= len(frame)
                    self._sent.set()
                await self._changed.wait()

    def _arrived(self, frame: bytes) -> None:
        kind, number, pipe = HEAD.unpack_from(frame)
        data = frame[HEAD.size :]
        if kind == PING:
            self.post(PONG)
        elif kind == NOTICE:
            self.on_notice(_unpacked(data).fields)
        elif kind == REQUEST:
            fields, blob = _unpacked(data)
            if number in self._served:
                raise ValueError(f"call {number} was made twice")
            call = WireCall(self, number, fields["op"], fields, blob)
            task = asyncio.ensure_future(self._serve(call))
            task.add_done_callback(lambda task: self._answered(call, task))  # also if it is cancelled before it begins
            self._served[number] = (call, task)
        elif kind in (DATA, ROOM):
            call = self._calls.get(number) or (self._served[number][0] if number in self._served else None)
            if call is not None and kind == DATA:
                call.arrived(pipe, data)
            elif call is not None:
                call.given_room(pipe, SIZE.unpack(data)[0])
        elif kind == CANCEL and number in self._served:
            self._served[number][1].cancel()
        elif kind in (ANSWER, ERROR) and (call := self._calls.pop(number, None)):
            answer = _unpacked(data)
            call.ended(answer if kind == ANSWER else error_of(answer.fields))

    def _answered(self, call: WireCall, task: asyncio.Task[Answer]) -> None:
        del self._served[call.number]
        call.ended(Answer({}))
        error = SandboxDied("the call was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.post(ANSWER, call.number, 0, _packed(*task.result()))
        elif isinstance(error, Exception):
            self.post(ERROR, call.number, 0, _packed(fields_of(error)))


def _packed(fields: Mapping[str, Any], blob: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return SIZE.pack(len(text)) + text + blob


def _unpacked(data: bytes) -> Answer:
    (size,) = SIZE.unpack_from(data)
    fields = json.loads(data[SIZE.size : SIZE.size + size])
    if not isinstance(fields, dict):
        raise ValueError("a message is no JSON object")
    return Answer(fields, data[SIZE.size + size :])

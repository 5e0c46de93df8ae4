"""A command that a client started by hand, and the pumps between its pipes and the client that has it now.

What the command wrote and no client has got stays, for the client that adopts it.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

from goaly.sandboxes.command import Inlet, Process, Stream
from goaly.sandboxes.remote_sandbox import EXTRA, STDERR, STDIN, STDOUT
from goaly.sandboxes.remote_wire import READY, Answer, WireCall

LINGER_SECONDS = 0.05
"""A process in the background may hold the pipes of a command that has ended."""


class StreamPump:
    """Sends an output of a command as fast as its reader reads; meanwhile the command waits (remote-1)."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parts: deque[bytes] = deque()
        self._came, self._sent = asyncio.Event(), asyncio.Event()
        stream.on_bytes = self._take

    def _take(self, data: bytes) -> None:
        self._parts.append(data)
        self._stream.pause()
        self._came.set()

    async def run(self, call: WireCall, pipe: int) -> None:
        """Send until cancelled."""
        while True:
            while self._parts:
                try:
                    await call.send(pipe, self._parts[0])
                except BrokenPipeError:
                    self._stream.close()  # as a pipe that nobody reads
                self._parts.popleft()
            self._sent.set()
            self._stream.resume()
            self._came.clear()
            await self._came.wait()

    async def flush(self) -> None:
        """Wait until all that the command has written by now is sent."""
        self._stream.drain()
        while self._parts:
            self._sent.clear()
            await self._sent.wait()


class InletPump:
    """Sends what a command writes beside its two streams, each part after what it wrote to them before."""

    def __init__(self, inlet: Inlet, before: Iterable[StreamPump]) -> None:
        self._inlet = inlet
        self._before = before
        self._data = b""

    async def run(self, call: WireCall, pipe: int) -> None:
        """Send until its end."""
        with suppress(BrokenPipeError):
            while self._data or (data := await self._inlet.read()):
                self._data = self._data or data
                for pump in self._before:
                    await pump.flush()
                await call.send(pipe, self._data)
                self._data = b""
        call.end(pipe)


async def give_input(
    call: WireCall, pipe: int, write: Callable[[bytes], Awaitable[None]], close: Callable[[], None]
) -> None:
    """Give a command what comes for it, until the end."""
    try:
        async for data in call.bytes_of(pipe):
            await write(data)
    except BrokenPipeError:
        call.refuse(pipe)
    close()


class ServedProcess:
    """A running command. One client at a time has it."""

    def __init__(self, process: Process, shape: Mapping[str, int]) -> None:
        self.process = process
        self.shape = shape
        """The facts of its pipes that its client needs."""
        self.has_client = False
        self._streams = [StreamPump(process.stdout), StreamPump(process.stderr)]
        self._inlets = [InletPump(inlet, self._streams) for inlet in process.extra_outputs]

    async def serve(self, call: WireCall) -> Answer:
        """Connect it with a client until it ends. A call that is cancelled leaves it as it is."""
        self.has_client = True
        process = self.process
        works = [pump.run(call, pipe) for pump, pipe in zip(self._streams, (STDOUT, STDERR), strict=True)]
        works.append(give_input(call, STDIN, process.write, process.close_stdin))
        if (extra := process.extra_input) is not None:
            works.append(give_input(call, EXTRA, extra.write, extra.close))
        pumps = [asyncio.create_task(work) for work in works]
        last = [asyncio.create_task(pump.run(call, EXTRA + index)) for index, pump in enumerate(self._inlets, 1)]
        try:
            await call.send(READY, b"begun")
            code = await asyncio.shield(process.ended)
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await asyncio.gather(process.stdout.closed.wait(), process.stderr.closed.wait(), *last)
            for pump in self._streams:
                await pump.flush()
            return Answer({"code": code, "memory": code == -signal.SIGKILL and process.out_of_memory()})
        finally:
            self.has_client = False
            for task in (*pumps, *last):
                task.cancel()
            process.stdout.pause()
            process.stderr.pause()
            await asyncio.wait((*pumps, *last))

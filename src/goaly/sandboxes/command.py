"""A command that runs in a sandbox, seen from outside: its pipes, its end, and how it is ended."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import termios
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from goaly.sandboxes.contract import CommandResult, Limit, Output

CHUNK = 65_536


class Stream:
    """An output of a command: keeps the first and the last bytes of it as they come."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self.closed = asyncio.Event()
        """Set at its end."""
        self._on_bytes: Callable[[bytes], None] | None = None
        self._half = max(1, most // 2)
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def on_bytes(self) -> Callable[[bytes], None] | None:
        """Called with all that comes; first with what had come before it was set."""
        return self._on_bytes

    @on_bytes.setter
    def on_bytes(self, call: Callable[[bytes], None]) -> None:
        self._on_bytes = call
        if came := bytes(self._head + self._tail):  # over a wire, an output may come before its reader goes on
            call(came)

    def feed(self, data: bytes) -> None:
        """Take what came."""
        self.total += len(data)
        if self._on_bytes:
            self._on_bytes(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 4 * self._half + CHUNK:
            del self._tail[: -self._half]

    def pause(self) -> None:
        """Let the command wait until `resume`, if it writes much more."""

    def resume(self) -> None:
        """Take again what it writes."""

    def drain(self) -> None:
        """Take what the command has written by now."""

    def taken(self) -> Output:
        """The output so far, which is then forgotten."""
        tail = bytes(self._tail[-self._half :])
        output = Output(bytes(self._head), tail, self.total - len(self._head) - len(tail))
        self._head.clear()
        self._tail.clear()
        self.total = 0
        return output

    def close(self) -> None:
        """Nothing more comes."""
        self.closed.set()


class PipeStream(Stream):
    """An output that comes by a pipe of this host."""

    def __init__(self, fd: int, most: int) -> None:
        super().__init__(most)
        self._fd: int | None = fd
        os.set_blocking(fd, False)
        self.resume()

    def pause(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)

    def resume(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> int:
        """Take a part of what is in the pipe; the number of its bytes."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return 0
        if data:
            self.feed(data)
        else:
            self.close()
        return len(data)

    def drain(self) -> None:
        if self._fd is None:
            return
        waiting = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, waiting)
        left = waiting[0]  # a command that goes on writing would keep this loop for ever
        while left > 0 and (taken := self._read()):
            left -= taken

    def close(self) -> None:
        if self._fd is not None:
            self.pause()
            os.close(self._fd)
            self._fd = None
            super().close()


class Outlet(Protocol):
    """An input of a command."""

    async def write(self, data: bytes) -> None:
        """Write as fast as the command reads; BrokenPipeError if nobody reads any more."""

    def close(self) -> None: ...


class Inlet(Protocol):
    """An output of a command beside its two streams."""

    async def read(self) -> bytes:
        """The next bytes; none at the end, or when nothing is left of a command that has ended."""
        ...

    def close(self) -> None: ...


class Pipe:
    """A pipe of this host to a command or from it."""

    def __init__(self, fd: int, ended: asyncio.Future[int]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._ended = ended

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[:CHUNK]) :]
            except BlockingIOError:
                if self._ended.done():
                    raise BrokenPipeError from None
                await self._ready(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)

    async def read(self) -> bytes:
        while True:
            try:
                return os.read(self._fd, CHUNK)
            except BlockingIOError:
                if self._ended.done():
                    return b""
                await self._ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        """Wait until the pipe can be written or read, or the command has ended."""
        ready = asyncio.Event()
        add(self._fd, ready.set)
        waiting = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait({waiting, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            remove(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Process:
    """A running command. `communicate` runs it to its end; long ones are written to, read and killed by hand."""

    def __init__(
        self,
        stdin: Outlet | None,
        stdout: Stream,
        stderr: Stream,
        *,
        ended: asyncio.Future[int],
        kill: Callable[[int, Sequence[int] | None], Awaitable[None]],
        out_of_memory: Callable[[], bool],
        extra_input: Outlet | None = None,
        extra_outputs: Sequence[Inlet] = (),
    ) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.extra_input = extra_input
        """Its descriptor 3, which it reads."""
        self.extra_outputs = extra_outputs
        """Its descriptors 4 and above, which it writes."""
        self.ended = ended
        """Its exit code; an error if the sandbox died."""
        self.out_of_memory = out_of_memory
        """Whether the kernel has killed a process of the sandbox for its memory since the last call."""
        self._stdin = stdin
        self._kill = kill
        self._began = time.monotonic()

    async def write(self, data: bytes) -> None:
        """Write to its input as fast as it reads. A command that has closed its input is no error."""
        if self._stdin is not None:
            with suppress(BrokenPipeError):
                await self._stdin.write(data)

    def close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
            self._stdin = None

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to its process group."""
        await self._kill(number, None)

    async def kill_session(self, keep: Sequence[int], number: int = signal.SIGKILL) -> None:
        """Send a signal to every process group of its session but its own and those in `keep`."""
        await self._kill(number, keep)

    async def communicate(
        self, stdin: bytes | AsyncIterable[bytes] = b"", seconds: float | None = None
    ) -> CommandResult:
        """Write its input and wait for its end. It is killed after `seconds`, or if the caller is cancelled."""
        limit = None
        try:
            async with asyncio.timeout(seconds):
                if isinstance(stdin, bytes):
                    await self.write(stdin)
                else:
                    async for part in stdin:
                        await self.write(part)
                self.close_stdin()
                code = await asyncio.shield(self.ended)
                # A process in the background may hold the pipes open; its output is not the command's.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await asyncio.gather(self.stdout.closed.wait(), self.stderr.closed.wait())
        except TimeoutError:
            limit = Limit.TIME
            await self.kill()
            code = await asyncio.shield(self.ended)
        except BaseException:
            if not self.ended.done():
                await asyncio.shield(self.kill())
            raise
        finally:
            self.close()
        if limit is None and code == -signal.SIGKILL and self.out_of_memory():
            limit = Limit.MEMORY
        return self.result(code, self._began, limit)

    def result(self, code: int, began: float, limit: Limit | None) -> CommandResult:
        """The result of what has run since `began`, with the output since the last result."""
        return CommandResult(
            exit_code=code if code >= 0 else 128 - code,
            stdout=self.stdout.taken(),
            stderr=self.stderr.taken(),
            seconds=time.monotonic() - began,
            limit=limit,
        )

    def close(self) -> None:
        """Close its pipes on this side."""
        self.close_stdin()
        for stream in (self.stdout, self.stderr):
            if not stream.closed.is_set():
                stream.drain()
                stream.close()
        for pipe in (self.extra_input, *self.extra_outputs):
            if pipe is not None:
                pipe.close()

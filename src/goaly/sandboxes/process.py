"""A command that runs in a sandbox, seen from outside: its pipes, its end, and how it is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from goaly.sandboxes.contract import CommandResult, Limit, Output

CHUNK = 65_536


class Stream:
    """Reads a pipe as its bytes come and keeps the first and the last of them."""

    def __init__(self, fd: int, most: int) -> None:
        self.fd: int | None = fd
        self.total = 0
        self.closed = asyncio.Event()
        self.on_bytes: Callable[[bytes], None] | None = None
        self._half = max(1, most // 2)
        self._head = bytearray()
        self._tail = bytearray()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        assert self.fd is not None
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self.total += len(data)
        if self.on_bytes:
            self.on_bytes(data)
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 4 * self._half + CHUNK:
            del self._tail[: -self._half]

    def drain(self) -> None:
        """Take what is in the pipe now."""
        before = -1
        while self.fd is not None and self.total != before:
            before = self.total
            self._read()

    def taken(self) -> Output:
        """The output so far, which is then forgotten."""
        tail = bytes(self._tail[-self._half :])
        output = Output(bytes(self._head), tail, self.total - len(self._head) - len(tail))
        self._head.clear()
        self._tail.clear()
        self.total = 0
        return output

    def close(self) -> None:
        if self.fd is not None:
            asyncio.get_running_loop().remove_reader(self.fd)
            os.close(self.fd)
            self.fd = None
            self.closed.set()


class Process:
    """A running command. `communicate` runs it to its end; long ones are written to, read and killed by hand."""

    def __init__(
        self,
        stdin: int,
        stdout: int,
        stderr: int,
        *,
        output_bytes: int,
        kill: Callable[[int, Sequence[int] | None], Awaitable[None]],
        out_of_memory: Callable[[], bool],
        extra: list[int],
    ) -> None:
        self.stdout = Stream(stdout, output_bytes)
        self.stderr = Stream(stderr, output_bytes)
        self.extra = extra
        self._stdin: int | None = stdin
        self._kill = kill
        self._out_of_memory = out_of_memory
        self._began = time.monotonic()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code; an error if the sandbox died."""

    async def write(self, data: bytes) -> None:
        """Write to its input as fast as it reads. A command that has closed its input is no error."""
        if self._stdin is not None:
            with suppress(BrokenPipeError):
                await self.write_to(self._stdin, data)

    async def write_to(self, fd: int, data: bytes) -> None:
        """Write to one of its pipes as fast as it reads; BrokenPipeError if nobody reads it any more."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view[:CHUNK]) :]
            except BlockingIOError:
                await self.ready(fd, write=True)
                if self.ended.done():
                    raise BrokenPipeError from None

    async def ready(self, fd: int, *, write: bool) -> None:
        """Wait until a pipe can be written or read, or the command has ended."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        (loop.add_writer if write else loop.add_reader)(fd, ready.set)
        waiting = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait({waiting, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            (loop.remove_writer if write else loop.remove_reader)(fd)

    def close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to its process group."""
        await self._kill(number, None)

    async def kill_session(self, keep: Sequence[int], number: int = signal.SIGKILL) -> None:
        """Send a signal to every process group of its session but its own and those in `keep`."""
        await self._kill(number, keep)

    async def communicate(self, stdin: bytes = b"", seconds: float | None = None) -> CommandResult:
        """Write its input and wait for its end. It is killed after `seconds`, or if the caller is cancelled."""
        limit = None
        try:
            async with asyncio.timeout(seconds):
                await self.write(stdin)
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
        if limit is None and code == -signal.SIGKILL and self._out_of_memory():
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
        while self.extra:
            os.close(self.extra.pop())

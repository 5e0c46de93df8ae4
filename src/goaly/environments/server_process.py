"""The process of an environment's server, and its shared use.

    Command(arguments=[".venv-game/bin/uvicorn", "game:app", "--fd", "{fd}"], log=folder / "game.log")

`{fd}` becomes the descriptor of a listening socket (`uvicorn --fd`), so that nobody else can take the port. A program
that can't be given a socket gets the number of a free port in place of `{port}`. The process and all its descendants
end with their owner, however that ends (environments-1).
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from goaly.base.atomic_files import open_lines
from goaly.environments import guardian
from goaly.environments.protocol import Disconnected, EnvironmentDied, EnvironmentTimeout, Unsent

T = TypeVar("T")

LOCALHOST = "127.0.0.1"
STOP_SECONDS = 5.0
"""Time for the guardian to kill the environment's processes; then it is killed too."""
DYING_SECONDS = 2.0
"""A connection may break, or be refused, so long before its process has ended."""
LOG_LINES = 20
_LOG_BYTES = 1 << 14
_LINE_BYTES = 1 << 26
_FIRST_RETRY_SECONDS = 0.01
_MOST_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that starts an environment's server."""

    arguments: Sequence[str]
    """The program and its arguments; `{fd}` or `{port}` in them says where it serves HTTP. Without, it uses stdio."""
    log: Path
    """File to which its output is appended: standard error, and standard output if it serves HTTP."""
    folder: Path | None = None
    """Its working folder; None is that of this process."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, in addition to those of this process."""
    start_seconds: float = 60.0
    """Time limit for its first answer."""

    def appended_log(self) -> BinaryIO:
        """Its log, open at the end."""
        return os.fdopen(open_lines(self.log, cut=False), "ab")

    @property
    def serves_http(self) -> bool:
        """Whether it serves HTTP."""
        return any(place in argument for argument in self.arguments for place in ("{fd}", "{port}"))


async def guarded(arguments: Sequence[str], folder: str | Path = "", **options: Any) -> Process:
    """The guardian of this command, which has started. It removes `folder` if this process ends first. `options` are
    those of `create_subprocess_exec`."""
    guard = (sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), str(folder))
    return await asyncio.create_subprocess_exec(*guard, *arguments, start_new_session=True, **options)


async def stopped(process: Process, ended: "asyncio.Future[int]") -> None:
    """Kill a guardian's command and all its descendants. `ended` is its exit code, which is there on return."""
    with suppress(ProcessLookupError):
        process.terminate()
    await asyncio.wait([ended], timeout=STOP_SECONDS)
    with suppress(ProcessLookupError):
        process.kill()
    await asyncio.wait([ended])  # unblocked by the kernel


def end_of(code: int) -> str:
    """How a guardian's command ended, by the guardian's exit code."""
    return f"signal {signal.Signals(code - 128).name}" if 128 < code < 160 else f"exit code {code}"


class ServerProcess:
    """A running server. `start` makes one."""

    def __init__(self, process: Process, command: Command, port: int | None):
        self._process = process
        self._command = command
        self._ended = asyncio.ensure_future(process.wait())
        self.port = port
        """The port of 127.0.0.1 at which it serves HTTP; None if it uses stdio."""

    @classmethod
    async def start(cls, command: Command) -> "ServerProcess":
        """A process that answers HTTP, or has started to use stdio."""
        with socket.socket() as listening, command.appended_log() as log:
            listening.bind((LOCALHOST, 0))
            places = {"{fd}": listening.fileno(), "{port}": listening.getsockname()[1]}
            given = any("{fd}" in argument for argument in command.arguments)
            if given:
                listening.listen(socket.SOMAXCONN)
            else:
                listening.close()
            server = cls(
                await guarded(
                    [_filled(argument, places) for argument in command.arguments],
                    stdin=DEVNULL if command.serves_http else PIPE,
                    stdout=log if command.serves_http else PIPE,
                    stderr=log,
                    cwd=command.folder,
                    env={**os.environ, **command.variables},
                    pass_fds=[listening.fileno()] if given else [],
                    limit=_LINE_BYTES,
                ),
                command,
                places["{port}"] if command.serves_http else None,
            )
        try:
            if command.serves_http:
                async with asyncio.timeout(command.start_seconds):
                    await server.unless_dead(server._first_answer())
        except TimeoutError:
            await server.stop()
            raise EnvironmentTimeout(
                f"{server}: no answer within {command.start_seconds:g} s; {server._log_end()}"
            ) from None
        except BaseException:
            await server.stop()
            raise
        return server

    def __str__(self) -> str:
        return f"environment {self._command.arguments[0]} (process {self.pid})"

    @property
    def pid(self) -> int:
        """The process id of its guardian."""
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        assert self.port is not None, "it uses stdio"
        return f"http://{LOCALHOST}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.done()

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """Its standard input, if it uses stdio."""
        assert self._process.stdin is not None, "it serves HTTP"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Its standard output, if it uses stdio."""
        assert self._process.stdout is not None, "it serves HTTP"
        return self._process.stdout

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of this work; EnvironmentDied if the process ends before, also if that is why it failed."""
        if self._ended.done():
            work.close()
            raise self.death()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._ended], return_when=asyncio.FIRST_COMPLETED)
            broken = task.done() and not task.cancelled() and isinstance(task.exception(), (Disconnected, Unsent))
            if broken:
                await asyncio.wait([self._ended], timeout=DYING_SECONDS)
            if self._ended.done() and (broken or not task.done()):
                raise self.death() from (task.exception() if broken else None)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def death(self) -> EnvironmentDied:
        """The error that says how it ended."""
        return EnvironmentDied(f"{self} ended with {end_of(self._ended.result())}; {self._log_end()}")

    async def stop(self) -> None:
        """Kill it and all its descendants. Does nothing the second time."""
        await stopped(self._process, self._ended)

    async def _first_answer(self) -> None:
        """Return when it has answered an HTTP request."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                reader, writer = await asyncio.open_connection(LOCALHOST, self.port)
                try:
                    writer.write(b"GET / HTTP/1.0\r\n\r\n")
                    if await reader.read(1):
                        return
                finally:
                    writer.close()
            except OSError:
                pass
            await asyncio.sleep(pause)  # only a program that opens the port itself is asked twice
            pause = min(2 * pause, _MOST_RETRY_SECONDS)

    def _log_end(self) -> str:
        with open(self._command.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return f"{self._command.log} ends with:\n" + "\n".join(lines) if lines else f"{self._command.log} is empty"


class Server:
    """A server that environments share. It starts when it is first needed, and again when it has ended.

    Used as `async with Server(command) as server:`, or closed with `close`.
    """

    def __init__(self, command: Command):
        self._command = command
        self._process: ServerProcess | None = None
        self._starting = asyncio.Lock()
        self.starts = 0
        """How often it was started."""

    async def running(self) -> ServerProcess:
        """The process, which is alive now."""
        async with self._starting:
            if self._process is None or not self._process.alive:
                self._process = await ServerProcess.start(self._command)
                self.starts += 1
            return self._process

    async def close(self) -> None:
        """Stop the process."""
        async with self._starting:
            if self._process is not None:
                await self._process.stop()

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Elsewhere:
    """A server at a URL that somebody else runs."""

    alive = True

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    async def running(self) -> "Elsewhere":
        """This server."""
        return self

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of this work: nobody here knows when the server dies."""
        return await work

    async def close(self) -> None:
        """Do nothing."""


def _filled(argument: str, places: Mapping[str, int]) -> str:
    for place, number in places.items():
        argument = argument.replace(place, str(number))
    return argument

"""One live sandbox, and the host that starts sandboxes, as every backend offers them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from goaly.sandboxes.command import Process
from goaly.sandboxes.contract import CommandResult, Entry, FileSnapshot, Program, SandboxSpec

DEFAULTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Closable(Protocol):
    """Something that serves until it is closed."""

    def close(self) -> None: ...


class Sandbox(ABC):
    """One live sandbox."""

    spec: SandboxSpec
    ticket: Any
    """Names it to another process, whose host adopts it by this; it can be pickled."""
    variables: Mapping[str, str] = DEFAULTS
    """Variables of its commands that neither its spec nor their caller set."""
    _kept: Process | None = None
    _on_end: tuple[Callable[[], None], ...] = ()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this once when it has ended, stopped or died; now, if it has."""
        self._on_end += (call,)
        if not self.alive():
            self.ended()

    def ended(self) -> None:
        """Backends say so as soon as it has ended, whatever ended it."""
        calls, self._on_end = self._on_end, ()
        for call in calls:
            call()

    async def assign(self, spec: SandboxSpec) -> None:
        """Turn one that waited in a pool into one of `spec`, which has other labels; its time to live begins now."""
        self.spec = spec

    async def start(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        output_bytes: int = 65_536,
        extra_pipes: int = 0,
    ) -> Process:
        """A running command: a program with its words, or a text for `sh -c`.

        Its extra pipes are descriptors 3 and above: it reads the first one, and writes the others."""
        return await self._start(self._program(command, cwd, env, user, output_bytes, extra_pipes))

    def _program(
        self,
        command: Sequence[str] | str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: int | None,
        output_bytes: int,
        extra_pipes: int = 0,
    ) -> Program:
        return Program(
            words=["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            variables={**self.variables, **self.spec.environment, **(env or {})},
            cwd=cwd or self.spec.workdir,
            user=self.spec.user if user is None else user,
            output_bytes=output_bytes,
            extra_pipes=extra_pipes,
        )

    @abstractmethod
    async def _start(self, program: Program) -> Process:
        """A running program."""

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        seconds: float = 60.0,
        output_bytes: int = 65_536,
    ) -> CommandResult:
        """Run a command to its end, `seconds` at most. `output_bytes` of each stream are kept, head and tail."""
        return await self._run(self._program(command, cwd, env, user, output_bytes), stdin, seconds)

    async def _run(self, program: Program, stdin: bytes, seconds: float) -> CommandResult:
        process = await self._start(program)
        return await process.communicate(stdin, seconds)

    async def keep(self, process: Process) -> None:  # noqa: B027
        """Let an adopter go on with this command, where the backend can; of several calls the last counts."""

    def kept(self) -> Process | None:
        """The command that an earlier owner kept, with all its pipes; None if there is none, or it was taken."""
        kept, self._kept = self._kept, None
        return kept

    @abstractmethod
    async def upload(self, entries: Sequence[Entry], to: str, *, user: int | None = None) -> None:
        """Write files, folders and links below a folder of the sandbox, as one of its users."""

    @abstractmethod
    async def download(self, path: str, *, most_bytes: int = 1 << 28, user: int | None = None) -> list[Entry]:
        """The file, or everything below the folder, at a path. Devices, sockets and pipes are left out."""

    async def read(self, path: str, *, most_bytes: int = 1 << 26) -> bytes:
        """The contents of a file."""
        entries = await self.download(path, most_bytes=most_bytes)
        if len(entries) != 1 or entries[0].kind != "file":
            raise IsADirectoryError(f"{path} is not a file")
        return entries[0].contents

    async def write(self, path: str, contents: bytes, *, mode: int = 0o644) -> None:
        """Write a file, and the folders above it."""
        folder, _, name = path.rpartition("/")
        await self.upload([Entry(path=name, contents=contents, mode=mode)], folder or "/")

    @abstractmethod
    async def snapshot(self) -> FileSnapshot:
        """Its files now. No process of it may be running. It goes on as before."""

    @abstractmethod
    async def serve(self, port: int, handler: Handler) -> Closable:
        """Handle connections to 127.0.0.1:`port` inside by a function outside, until the result is closed."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether it can run commands."""

    @abstractmethod
    async def stop(self) -> None:
        """End it: its processes, files and control groups are gone when this returns."""


class SandboxHost(ABC):
    """Starts sandboxes. They end with its `close`, or with its process."""

    slots: ClassVar[str] = "starts"
    """The folder of the slots that pace its starts. Hosts that start sandboxes by way of another one have one of their
    own: the other one may be on this machine, and need slots while they wait for it."""

    @abstractmethod
    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> Sandbox:
        """A sandbox in the state of its root, or of a snapshot."""

    def alive(self) -> bool:
        """Whether it can start sandboxes; one that cannot is closed, and another one opened."""
        return True

    @abstractmethod
    async def adopt(self, ticket: Any) -> Sandbox:
        """Take over a sandbox that another process has left, with its files and background processes as they are."""

    @abstractmethod
    async def leave(self) -> None:
        """Go without ending the sandboxes: each waits `seconds_unowned` for a host that adopts it."""

    @abstractmethod
    async def forget(self, snapshot: FileSnapshot) -> None:
        """Free the newest layer of a snapshot. Sandboxes that started from it keep it."""

    @abstractmethod
    async def close(self) -> None:
        """End the sandboxes."""

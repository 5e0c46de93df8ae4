"""One live sandbox, as every backend offers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from goaly.sandboxes.contract import CommandResult, Entry, FileSnapshot, SandboxSpec
from goaly.sandboxes.process import Process


class Sandbox(ABC):
    """One live sandbox."""

    spec: SandboxSpec

    @abstractmethod
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
        """A running command: a program with its words, or a text for `sh -c`."""

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
        process = await self.start(command, cwd=cwd, env=env, user=user, output_bytes=output_bytes)
        return await process.communicate(stdin, seconds)

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
    def alive(self) -> bool:
        """Whether it can run commands."""

    @abstractmethod
    async def stop(self) -> None:
        """End it: its processes, files and control groups are gone when this returns."""

"""The promises of every backend of sandboxes, and the records that cross it.

A command that fails is a result. A sandbox that died raises `SandboxDied`, and is never replaced by a blank one in
silence. No layer retries a command. A caller that is cancelled ends the command that it started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from goaly.base.config.settings import PositiveFloat, PositiveInt, Settings
from goaly.environments.protocol import EnvironmentFailed

USERS_FOLDERS = ("/tmp", "/var/tmp", "/root", "/home", "/run", "/mnt", "/media", "/srv")


class SandboxError(EnvironmentFailed):
    """An error of the machine that runs a sandbox, not of the commands inside. It ends an episode, which may begin
    again (`rollout.episode_retries`)."""


class SandboxUnavailable(SandboxError):
    """A sandbox could not be started; the message says what is missing."""


class SandboxFull(SandboxUnavailable):
    """There is no room for a sandbox now."""


class SnapshotLost(SandboxUnavailable):
    """The snapshot from which a sandbox should start is not there any more: its server ended, or it was forgotten."""


class SandboxDied(SandboxError):
    """A sandbox ended, or its server did: its files and processes are gone."""


class Limit(StrEnum):
    """The limit that ended a command."""

    TIME = "time"
    """The command's own timeout."""
    MEMORY = "memory"
    """The kernel killed a process, because the sandbox's memory was used up."""


class Limits(Settings):
    """The most that one sandbox may use."""

    memory_mib: PositiveInt = 2048
    """Memory of all its processes and of the files that it wrote."""
    disk_mib: PositiveInt = 1024
    """Bytes of the files that it wrote."""
    files: PositiveInt = 200_000
    """Files and folders that it made."""
    processes: PositiveInt = 256
    """Processes and threads at once."""
    cpus: PositiveFloat = 1.0
    """CPUs, as a share of time."""
    file_mib: PositiveInt = 1024
    """Bytes of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """How a sandbox begins."""

    root: Path = Path("/")
    """The folder that is its root. It is read only for the sandbox: writes go to memory."""
    image: str | None = None
    """A container image by name, a tar of one, or a folder with a Dockerfile, in place of `root`."""
    user: int = 1000
    """The user of its commands. 0 has no more rights than others, but owns the root's files."""
    workdir: str = "/"
    """Folder in which commands start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of each command, beside PATH, HOME and LANG."""
    limits: Limits = field(default_factory=Limits)
    seconds_unowned: int = 120
    """It ends this long after its client has gone, unless another client adopts it."""
    seconds_to_live: float | None = None
    """It ends this long after its start, whoever owns it; None is no limit."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Names of its run, its episode or the like: `python -m goaly.sandboxes list` shows them."""
    debuggers: bool = False
    """Allow ptrace, for gdb and strace."""
    hidden: tuple[str, ...] | None = None
    """Folders of the root that are empty inside. None: those with users' files, if the root is the host's own."""

    @property
    def hidden_folders(self) -> tuple[str, ...]:
        """`hidden`, relative to the root."""
        folders = self.hidden if self.hidden is not None else USERS_FOLDERS if self.root == Path("/") else ()
        return tuple(folder.strip("/") for folder in folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command as a backend starts it: nothing is left to its spec."""

    words: Sequence[str]
    variables: Mapping[str, str]
    cwd: str
    user: int
    output_bytes: int
    extra_pipes: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of a stream: all, or the first and the last of them."""

    head: bytes
    tail: bytes = b""
    omitted: int = 0

    def text(self) -> str:
        """As text, with a mark in place of omitted bytes."""
        if not self.omitted:
            return (self.head + self.tail).decode(errors="replace")
        mark = f"\n[... {self.omitted} bytes omitted ...]\n"
        return self.head.decode(errors="replace") + mark + self.tail.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The end of a command."""

    exit_code: int
    """As the shell counts: 128 + N after signal N."""
    stdout: Output
    stderr: Output
    seconds: float
    limit: Limit | None = None
    """The limit that ended it, if one did."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.limit is None


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """The files of a sandbox at one moment; sandboxes that start from it share them until they write."""

    layers: tuple[str, ...]
    """Names of its layers at the server, the newest first; the last one is the root's."""
    spec: SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file, a folder, or a link, whose contents are its target, on its way into a sandbox or out of it."""

    path: str
    kind: Literal["file", "folder", "link"] = "file"
    contents: bytes = b""
    mode: int = 0o644

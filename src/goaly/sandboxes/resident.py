"""A sandbox whose first process runs commands and moves files (`native/commands.c`), as its client sees it."""

from __future__ import annotations

import os
import resource
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress

from goaly.sandboxes.channel import Channel, Message
from goaly.sandboxes.contract import Entry, SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.files import entries_of, stream_of
from goaly.sandboxes.process import Process
from goaly.sandboxes.sandbox import Sandbox

OPEN_FILES = 4096


class ResidentSandbox(Sandbox):
    """Commands and files of a sandbox, by requests to its first process."""

    def __init__(self, spec: SandboxSpec, channel: Channel) -> None:
        self.spec = spec
        self._processes: dict[int, Process] = {}
        self._pipes: dict[int, tuple[int, Sequence[int]]] = {}
        """The output's bound and the pipes of each command on this side."""
        self._kept: Process | None = None
        self._kills = self._memory_kills()
        self._channel = channel
        self._channel.on_event = self._event
        self._channel.on_close = self.died

    @abstractmethod
    def _memory_kills(self) -> int:
        """How often the kernel has killed a process of it, because its memory was used up."""

    async def ready(self) -> None:
        """Wait until commands can run."""
        message = await self._channel.expect(0)
        if message[0] == "E":
            raise SandboxUnavailable(f"a sandbox did not start: {message[2][0]}")

    async def _start(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        cwd: str,
        user: int,
        output_bytes: int,
        extra_pipes: int,
    ) -> Process:
        largest = self.spec.limits.file_mib << 20
        limits = [resource.RLIMIT_CORE, 0, resource.RLIMIT_FSIZE, largest, resource.RLIMIT_NOFILE, OPEN_FILES]
        ours, theirs = [], []
        for theirs_reads in (True, False, False, *(index == 0 for index in range(extra_pipes))):
            reader, writer = os.pipe()
            ours.append(writer if theirs_reads else reader)
            theirs.append(reader if theirs_reads else writer)
        fields = [user, user, cwd, len(limits) // 2, *limits, len(words), *words]
        fields += [f"{key}={value}" for key, value in variables.items()]
        return self._begin("R", fields, ours, theirs, output_bytes)

    async def _kill(self, number: int, signal_number: int, keep: Sequence[int] | None) -> None:
        fields = ["group"] if keep is None else ["session", *keep]
        with suppress(SandboxDied):
            await self._channel.ask("K", number, signal_number, *fields)

    def _killed_for_memory(self) -> bool:
        before, self._kills = self._kills, self._memory_kills()
        return self._kills > before

    async def upload(self, entries: Sequence[Entry], to: str, *, user: int | None = None) -> None:
        reader, writer = os.pipe()
        process = self._move_files("W", to, user, reader, (writer, _empty()), 1)
        try:
            for part in stream_of(entries):
                await process.write(part)
            process.close_stdin()
            await process.ended
        finally:
            process.close()

    async def download(self, path: str, *, most_bytes: int = 1 << 28, user: int | None = None) -> list[Entry]:
        reader, writer = os.pipe()
        process = self._move_files("G", path, user, writer, (os.open(os.devnull, os.O_WRONLY), reader), 2 * most_bytes)
        try:
            await process.ended
            process.stdout.drain()
            output = process.stdout.taken()
        finally:
            process.close()
        if output.omitted or len(output.head) + len(output.tail) > most_bytes:
            raise ValueError(f"{path} has more than {most_bytes} bytes")
        return entries_of(output.head + output.tail)

    def _move_files(
        self, op: str, path: str, user: int | None, theirs: int, ours: tuple[int, int], most: int
    ) -> Process:
        user = self.spec.user if user is None else user
        return self._begin(op, [user, user, path], (*ours, _empty()), [theirs], most)

    def _begin(
        self, op: str, fields: Sequence[str | int], ours: Sequence[int], theirs: list[int], most: int
    ) -> Process:
        """Ask for a process. `ours` are its pipes on this side; `theirs` are closed here."""
        number = self._channel.new_id()
        process = self._process(number, most, ours)
        try:
            self._channel.send(op, number, *fields, fds=theirs)
        except BaseException:
            self._forget(number)
            process.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return process

    def _process(self, number: int, most: int, pipes: Sequence[int]) -> Process:
        process = Process.of_pipes(
            *pipes[:3],
            output_bytes=most,
            kill=lambda signal_number, keep: self._kill(number, signal_number, keep),
            out_of_memory=self._killed_for_memory,
            extra=pipes[3:],
        )
        self._processes[number], self._pipes[number] = process, (most, pipes)
        return process

    def _forget(self, number: int) -> None:
        del self._processes[number], self._pipes[number]

    async def keep(self, process: Process) -> None:
        number = next((number for number, one in self._processes.items() if one is process), None)
        if number is not None:
            await self._keep(number, *self._pipes[number])

    async def _keep(self, number: int, output_bytes: int, pipes: Sequence[int]) -> None:
        """Leave a command's pipes where an adopter finds them, if the backend has such a place."""

    async def go_on_with(self, number: int, output_bytes: int, pipes: Sequence[int]) -> None:
        """Make a command of an earlier owner the one that is kept."""
        self._kept = self._process(number, output_bytes, pipes)
        await self._kill(number, 0, None)  # of one that has ended, its end is said again

    def kept(self) -> Process | None:
        kept, self._kept = self._kept, None
        return kept

    def alive(self) -> bool:
        return not self._channel.closed

    def died(self) -> None:
        """Its commands end with SandboxDied."""
        self._channel.on_close = lambda: None
        self._channel.close()
        for process in self._processes.values():
            if not process.ended.done():
                process.ended.set_exception(SandboxDied(f"{self._channel.name} has ended"))
                process.ended.exception()
        self._processes.clear()
        self._pipes.clear()
        if self._kept:
            self._kept.close()
        self.ended()

    def _event(self, message: Message) -> None:
        op, number, fields, _ = message
        process = self._processes.get(number)
        if process is None:
            return
        if op == "F" and not process.ended.done():
            process.ended.set_exception(OSError(int(fields[0]), os.strerror(int(fields[0])), fields[1]))
            process.ended.exception()
        elif op == "X":
            self._forget(number)
            if not process.ended.done():
                process.ended.set_result(int(fields[0]))


def _empty() -> int:
    """A pipe from which nothing comes."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader

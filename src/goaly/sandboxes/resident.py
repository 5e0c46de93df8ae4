"""A sandbox whose first process runs commands and moves files (`native/commands.c`), as its client sees it."""

from __future__ import annotations

import asyncio
import os
import resource
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from goaly.sandboxes.channel import Channel, Ends, Message
from goaly.sandboxes.command import Process, Stream
from goaly.sandboxes.contract import Entry, Program, SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.files import entries_of, stream_of
from goaly.sandboxes.sandbox import Sandbox

OPEN_FILES = 4096


def pipes_of_command(extra: int) -> str:
    """The letters, as `Channel.begin` has them, of a command's pipes."""
    return "rss" + "r" * min(extra, 1) + "w" * (extra - 1)


class ResidentSandbox(Sandbox):
    """Commands and files of a sandbox, by requests to its first process."""

    def __init__(self, spec: SandboxSpec, channel: Channel) -> None:
        self.spec = spec
        self._processes: dict[int, Process] = {}
        self._ends: dict[int, tuple[int, Ends]] = {}
        """The output's bound and the pipes of each command, on this side."""
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

    async def _start(self, program: Program) -> Process:
        largest = self.spec.limits.file_mib << 20
        limits = [resource.RLIMIT_CORE, 0, resource.RLIMIT_FSIZE, largest, resource.RLIMIT_NOFILE, OPEN_FILES]
        fields = [
            program.user,
            program.user,
            program.cwd,
            len(limits) // 2,
            *limits,
            len(program.words),
            *program.words,
        ]
        fields += [f"{key}={value}" for key, value in program.variables.items()]
        return self._begin("R", fields, pipes_of_command(program.extra_pipes), program.output_bytes)

    async def _kill(self, number: int, signal_number: int, keep: Sequence[int] | None) -> None:
        fields = ["group"] if keep is None else ["session", *keep]
        with suppress(SandboxDied):
            await self._channel.ask("K", number, signal_number, *fields)

    def _killed_for_memory(self) -> bool:
        before, self._kills = self._kills, self._memory_kills()
        return self._kills > before

    async def upload(self, entries: Sequence[Entry], to: str, *, user: int | None = None) -> None:
        user = self.spec.user if user is None else user
        process = self._begin("W", [user, user, to], "r", 1)
        try:
            for part in stream_of(entries):
                await process.write(part)
            process.close_stdin()
            await process.ended
        finally:
            process.close()

    async def download(self, path: str, *, most_bytes: int = 1 << 28, user: int | None = None) -> list[Entry]:
        user = self.spec.user if user is None else user
        process = self._begin("G", [user, user, path], "s", 2 * most_bytes)
        try:
            await process.ended
            process.stdout.drain()
            output = process.stdout.taken()
        finally:
            process.close()
        if output.omitted or len(output.head) + len(output.tail) > most_bytes:
            raise ValueError(f"{path} has more than {most_bytes} bytes")
        return entries_of(output.head + output.tail)

    def _begin(self, op: str, fields: Sequence[str | int], pipes: str, most: int) -> Process:
        """Ask for a process with these pipes, as `Channel.begin` names them."""
        number = self._channel.new_id()
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return self._process(number, most, self._channel.begin(op, number, fields, pipes, most, ended), ended)

    def _process(self, number: int, most: int, ends: Ends, ended: asyncio.Future[int]) -> Process:
        inputs = [*ends.inputs, None, None]
        process = Process(
            inputs[0],
            *[*ends.streams, Stream(1), Stream(1)][:2],
            ended=ended,
            kill=lambda signal_number, keep: self._kill(number, signal_number, keep),
            out_of_memory=self._killed_for_memory,
            extra_input=inputs[1],
            extra_outputs=ends.outputs,
        )
        self._processes[number], self._ends[number] = process, (most, ends)
        return process

    def _forget(self, number: int) -> None:
        del self._processes[number], self._ends[number]

    async def keep(self, process: Process) -> None:
        number = next((number for number, one in self._processes.items() if one is process), None)
        if number is not None:
            await self._keep(number, *self._ends[number])

    @abstractmethod
    async def _keep(self, number: int, output_bytes: int, ends: Ends) -> None:
        """Leave a command's pipes where an adopter finds them."""

    async def go_on_with(self, number: int, output_bytes: int, ends: Ends, ended: asyncio.Future[int]) -> None:
        """Make a command of an earlier owner the one that is kept."""
        self._kept = self._process(number, output_bytes, ends, ended)
        await self._kill(number, 0, None)  # of one that has ended, its end is said again

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
        self._ends.clear()
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

"""A shell that stays: folder, variables and background jobs of one command are there for the next.

The shell reads commands from a pipe of its own and reports on another, so a command neither eats the next one from its
input nor forges an exit code by its output.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Self

from goaly.sandboxes.contract import CommandResult, Limit, SandboxDied
from goaly.sandboxes.process import Process
from goaly.sandboxes.sandbox import Sandbox

PROGRAM = r"""
set -m
while IFS= read -r -d '' -u 3 command_; do
    eval "$command_" 3<&- 4>&- </dev/null
    printf '%d\n' "$?" >&4; jobs -p >&4; printf '\0' >&4
done
"""
"""With job control, each command has a process group of its own, which a timeout can end without the shell."""
GRACE_SECONDS = 2.0


class Shell:
    """One bash in a sandbox. `run` is for one caller at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.extra_input is not None
        self._commands, self._reports = process.extra_input, process.extra_outputs[0]
        self._lock = asyncio.Lock()
        self._jobs: list[int] = []
        """Process groups of background jobs, after the last command."""

    @classmethod
    async def open(
        cls, sandbox: Sandbox, *, output_bytes: int = 65_536, cwd: str | None = None, user: int | None = None
    ) -> Self:
        """A shell, which keeps `output_bytes` of each stream of a command."""
        words = ["bash", "--noprofile", "--norc", "-c", PROGRAM]
        process = await sandbox.start(words, cwd=cwd, user=user, output_bytes=output_bytes, extra_pipes=2)
        return cls(process)

    async def run(self, command: str, *, seconds: float = 60.0) -> CommandResult:
        """Run a command. One that exceeds its timeout is ended, and the shell stays; `exit` ends the shell."""
        if "\0" in command:
            raise ValueError("a command has a zero byte")
        async with self._lock:
            began = time.monotonic()
            limit = None
            try:
                async with asyncio.timeout(seconds):
                    await self._commands.write(command.encode(errors="surrogateescape") + b"\0")
                    code = await self._report()
            except BrokenPipeError as error:
                raise SandboxDied("the shell has ended") from error
            except TimeoutError:
                limit = Limit.TIME
                code = await self._end_command()
            except asyncio.CancelledError:
                await asyncio.shield(self._end_command())
                raise
            for stream in (self._process.stdout, self._process.stderr):
                stream.drain()
            return self._process.result(code, began, limit)

    async def _report(self) -> int:
        report = b""
        while not report.endswith(b"\0"):
            part = await self._reports.read()
            if not part:
                return await self._process.ended
            report += part
        code, *jobs = report[:-1].split()
        self._jobs = [int(job) for job in jobs]
        return int(code)

    async def _end_command(self) -> int:
        """End the command in the foreground, or the shell with everything in it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await self._process.kill_session(self._jobs)
                return await self._report()
        await self._process.kill()
        return await self._process.ended

    @property
    def alive(self) -> bool:
        """Whether it takes commands."""
        return not self._process.ended.done()

    async def close(self) -> None:
        """End the shell. Its background jobs stay until the sandbox ends."""
        if self.alive:
            await self._process.kill()
        self._process.close()

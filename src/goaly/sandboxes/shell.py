"""A shell that stays: folder, variables and background jobs of one command are there for the next.

The shell reads commands from a pipe of its own and reports on another, so a command neither eats the next one from its
input nor forges an exit code by its output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from goaly.sandboxes.command import Process
from goaly.sandboxes.contract import CommandResult, Limit, SandboxDied
from goaly.sandboxes.sandbox import Sandbox

RUN, PROBE, SKIP = b"run\0", b"\0probe\0", b"\0\1skip\0"
PROGRAM = r"""
set -m
exec 198>&1 199>&2
goaly_count_=0
while IFS= read -r -d '' -u 3 goaly_command_; do
    [[ $goaly_command_ == $'\1skip' ]] || IFS= read -r -d '' -u 3 goaly_start_ || break
    case $goaly_start_ in
    run) eval "$goaly_command_" 3<&- 4>&- </dev/null >&198 2>&199 198>&- 199>&-
        printf '= %d %d\n' "$?" "$((++goaly_count_))" >&4; jobs -p >&4; printf '\0' >&4 ;;
    probe) printf '=\0' >&4 ;;
    esac
    goaly_start_=
done
"""
ONE_STREAM = "exec 2>&1\n"
"""With job control, each command has a process group of its own, which a timeout can end without the shell.

A command is run when all of it and the word behind it have come: who adopts the shell skips one that came in part.
Each begins with the first outputs, whatever an `exec` of an earlier one has done with its own."""
OWN = "BASH[A-Z0-9_]*|DIRSTACK|FUNCNAME|GROUPS|PIPESTATUS|goaly_[a-z]*_"
SAVED = rf"""
printf 'cd %q\n' "$PWD"
declare -p | grep -Ev '^declare -([a-zA-Z]*r[a-zA-Z]* |[^ ]* ({OWN})(=|$))'
declare -f; alias -p; shopt -p; set +o
"""
"""Prints a shell's state, without the variables that a shell sets itself."""
GRACE_SECONDS = 2.0


class Shell:
    """One bash in a sandbox. `run` is for one caller at a time."""

    def __init__(self, process: Process, count: int = 0, jobs: Sequence[int] = ()) -> None:
        self._process = process
        assert process.extra_input is not None
        self._commands, self._reports = process.extra_input, process.extra_outputs[0]
        self._lock = asyncio.Lock()
        self._unread = b""
        self._is_probed = False
        self._count, self._jobs = count, list(jobs)

    @property
    def state(self) -> tuple[int, list[int]]:
        """The number of commands that have ended, and the process groups of its background jobs then."""
        return self._count, self._jobs

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        *,
        output_bytes: int = 65_536,
        cwd: str | None = None,
        user: int | None = None,
        one_stream: bool = False,
    ) -> Self:
        """A shell, which keeps `output_bytes` of each stream of a command. A process that adopts the sandbox can go on
        with it. With `one_stream` errors are in the output, in the order in which a terminal would show them."""
        words = ["bash", "--noprofile", "--norc", "-c", f"{ONE_STREAM if one_stream else ''}{PROGRAM}"]
        process = await sandbox.start(words, cwd=cwd, user=user, output_bytes=output_bytes, extra_pipes=2)
        await sandbox.keep(process)
        return cls(process)

    @classmethod
    def adopted(cls, sandbox: Sandbox, count: int, jobs: Sequence[int]) -> Self | None:
        """The shell of the earlier owner of an adopted sandbox, in the last `state` that is known of it. None: that
        owner had none, or the backend does not keep it. `rest` comes before `run`."""
        kept = sandbox.kept()
        return None if kept is None else cls(kept, count, jobs)

    async def script(self) -> str:
        """Commands that bring another shell into this one's folder, with its variables, functions and options."""
        result = await self.run(SAVED)
        return f"{{ {result.stdout.text()}\n}} 2> /dev/null"

    async def rest(self, *, seconds: float = 60.0) -> CommandResult | None:
        """Wait for the command that ran when the earlier owner went. Its result has what it wrote after that.

        None: none ran, or the earlier owner has read its end."""
        async with self._lock:
            began, count = time.monotonic(), self._count
            with suppress(BrokenPipeError):  # it has ended, perhaps with a report that nobody has read
                await self._commands.write(SKIP + PROBE)
            code, limit = await self._ended(seconds)
            result = self._result(code, began, limit)
            while self.alive and not self._is_probed:
                await self._report()
            return result if self._count > count or not self.alive else None

    async def run(self, command: str, *, seconds: float = 60.0) -> CommandResult:
        """Run a command. One that exceeds its timeout is ended, and the shell stays; `exit` ends the shell."""
        if "\0" in command:
            raise ValueError("a command has a zero byte")
        async with self._lock:
            began = time.monotonic()
            written = command.encode(errors="surrogateescape") + b"\0" + RUN
            code, limit = await self._ended(seconds, written)
            return self._result(code, began, limit)

    async def _ended(self, seconds: float, written: bytes = b"") -> tuple[int | None, Limit | None]:
        """Write to the shell, and wait for its next report; the exit code of the command that ended."""
        try:
            async with asyncio.timeout(seconds):
                await self._commands.write(written)
                return await self._report(), None
        except BrokenPipeError as error:
            raise SandboxDied("the shell has ended") from error
        except TimeoutError:
            return await self._end_command(), Limit.TIME
        except asyncio.CancelledError:
            await asyncio.shield(self._end_command())
            raise

    def _result(self, code: int | None, began: float, limit: Limit | None) -> CommandResult:
        for stream in (self._process.stdout, self._process.stderr):
            stream.drain()
        return self._process.result(code or 0, began, limit)

    async def _report(self) -> int | None:
        """The exit code of the command that has ended, or of the shell; None: a probe's, or one that was read in part
        by an earlier owner."""
        while b"\0" not in self._unread:
            part = await self._reports.read()
            if not part:
                return await self._exit_code()
            self._unread += part
        report, _, self._unread = self._unread.partition(b"\0")
        if not report.startswith(b"= "):
            self._is_probed |= report == b"="
            return None
        _, code, count, *jobs = report.split()
        self._count, self._jobs = int(count), [int(job) for job in jobs]
        return int(code)

    async def _end_command(self) -> int | None:
        """End the command in the foreground, or the shell with everything in it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await self._process.kill_session(self._jobs)
                return await self._report()
        await self._process.kill()
        return await self._exit_code()

    async def _exit_code(self) -> int:
        """Of the shell; a caller that is cancelled leaves it to the others."""
        return await asyncio.shield(self._process.ended)

    @property
    def alive(self) -> bool:
        """Whether it takes commands."""
        return not self._process.ended.done()

    async def close(self) -> None:
        """End the shell. Its background jobs stay until the sandbox ends."""
        if self.alive:
            await self._process.kill()
        self._process.close()

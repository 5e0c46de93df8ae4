"""The pool's side of one verifier process: start, send, reply, kill."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from goaly.base.errors import GoalyError
from goaly.prompts.prompt import Prompt
from goaly.reward.frames import HEADER_BYTES, Refused, body_length, decode_message, encode_message

START_LIMIT_SECONDS = 60.0
"""Longest time for a process to start and import its verifier."""

LOOK_SECONDS = 0.05

GONE_SECONDS = 1.0
"""Time for which a process continues with a response whose caller has gone; a new process costs about as much."""


class VerifierError(GoalyError):
    """A verifier could not score: it raised, returned no finite number, died, or can't be imported."""


class VerifierDied(VerifierError):
    """A verifier process ended."""


class VerifierProcess:
    """A child process that scores pairs in the order in which they are sent."""

    def __init__(self, process: Process):
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests = process.stdin
        self._replies = process.stdout

    @property
    def pid(self) -> int:
        """Its process id, which is its process group too."""
        return self._process.pid

    @classmethod
    async def start(cls, verifier: str) -> "VerifierProcess":
        """A process that has imported this verifier."""
        command = [sys.executable, "-m", "goaly.reward.child", verifier, str(os.getpid())]
        child = cls(
            await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
                start_new_session=True,
            )
        )
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                started = await child._read()
            if isinstance(started, Refused):
                raise VerifierError(f"verifier {verifier} can't be used: {started.why}")
        except TimeoutError:
            await child.kill()
            raise VerifierError(
                f"verifier {verifier} can't be used: importing it took over {START_LIMIT_SECONDS:.0f} s"
            ) from None
        except BaseException:
            await child.kill()
            raise
        return child

    async def send(self, pairs: Sequence[tuple[Prompt, str]]) -> None:
        """Send these pairs; the process gives one reply to each."""
        try:
            self._requests.write(encode_message(list(pairs)))
            await self._requests.drain()  # Unblocked by the child's reading, or by its death.
        except (BrokenPipeError, ConnectionResetError) as error:
            raise VerifierDied("the verifier's process is gone") from error

    async def reply(self, limit_seconds: float, caller: asyncio.Future[float]) -> float | Refused:
        """The next reply; TimeoutError if it is late, or if it comes later than `GONE_SECONDS` after the caller has
        gone.

        After a TimeoutError the process must be killed.
        """
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait([reading, caller], timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED)
            if caller.done() and not reading.done():
                await asyncio.wait([reading], timeout=min(GONE_SECONDS, limit_seconds))
            if not reading.done():
                # This loop may have been too busy to read a reply that came in time: look once more.
                await asyncio.wait([reading], timeout=LOOK_SECONDS)
            if not reading.done():
                raise TimeoutError
            return reading.result()
        finally:
            reading.cancel()

    async def kill(self) -> None:
        """Kill the process and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()  # unblocked by the kernel

    async def _read(self) -> Any:
        try:
            header = await self._replies.readexactly(HEADER_BYTES)
            return decode_message(await self._replies.readexactly(body_length(header)))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise VerifierDied(f"the verifier's process ended with {_exit_reason(code)}") from None


def _exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

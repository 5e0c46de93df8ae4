"""One verifier process: its program (`main`), the messages over its pipes, and the pool's side of it.

The process scores pairs of prompt and response, one after the other, until its input ends. Its standard output carries
the replies, so output of the verifier goes to standard error. Messages are length-prefixed pickles: both ends are
trusted and on one host. To the process: `list[tuple[Prompt, str]]`. From it: None when the verifier is imported, or a
`Refused`; then a score or a `Refused` for each pair.

    reward-2: The process dies with its parent, even while the verifier is running.
"""

import asyncio
import inspect
import math
import os
import pickle
import signal
import struct
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from goaly.base.errors import GoalyError
from goaly.base.process import die_with
from goaly.base.registry import function_at
from goaly.prompts.prompt import Prompt

START_LIMIT_SECONDS = 60.0
"""Longest time for a process to start and import its verifier."""
LOOK_SECONDS = 0.05
"""Last look for a reply after its time limit: this event loop may have been too busy to read it in time."""
GONE_SECONDS = 1.0
"""Time for which a process continues with a response whose caller has gone; a new process costs about as much."""
PROGRAM = "from goaly.reward.verifier_process import main; main()"  # not `-m`: `Refused` must have its own module
_HEADER = struct.Struct("!I")


class VerifierError(GoalyError):
    """A verifier could not score: it raised, returned no finite number, died, or can't be imported."""


class VerifierDied(VerifierError):
    """A verifier process ended."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The verifier could not be imported, raised, or returned no finite number."""

    why: str
    is_returned: bool = False
    """Whether it returned something that is no number."""


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
        command = [sys.executable, "-c", PROGRAM, verifier, str(os.getpid())]
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
            self._requests.write(_encoded(list(pairs)))
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
            (length,) = _HEADER.unpack(await self._replies.readexactly(_HEADER.size))
            return pickle.loads(await self._replies.readexactly(length))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise VerifierDied(f"the verifier's process ended with {reason}") from None


def _encoded(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def _read(source: BinaryIO) -> Any | None:
    """The next message; None at the end of the stream."""
    header = source.read(_HEADER.size)
    return pickle.loads(source.read(*_HEADER.unpack(header))) if len(header) == _HEADER.size else None


def main() -> None:
    """Serve until standard input ends; the arguments are `package.module:function PARENT_PID`."""
    verifier, parent_pid = sys.argv[1:]
    die_with(int(parent_pid))  # reward-2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C: it closes the input or kills this process
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which subprocesses of the verifier inherit
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        try:
            function = verifier_at(verifier)
        except Exception as error:
            replies.write(_encoded(Refused(_describe(error))))
            return
        replies.write(_encoded(None))
        replies.flush()
        while (pairs := _read(requests)) is not None:
            for prompt, response in pairs:
                replies.write(_encoded(_judge(function, prompt, response)))
                replies.flush()


def verifier_at(path: str) -> Callable[[Any, str], float]:
    """The verifier with this path; a TypeError if it can't be called with a prompt and a response."""
    function = function_at(path)
    if inspect.iscoroutinefunction(function):
        raise TypeError("it is a coroutine function, which a verifier's process does not await")
    with suppress(ValueError):  # some built-in functions have no signature
        inspect.signature(function).bind(None, "")
    return function


def _judge(function: Callable[[Any, str], float], prompt: Any, response: str) -> float | Refused:
    try:
        returned = function(prompt, response)
    except Exception as error:
        return Refused(_describe(error))
    try:
        value = float(returned)
    except Exception as error:  # also those of a user's own types
        return Refused(f"it returned a value of type {type(returned).__name__}: {error}", is_returned=True)
    return value if math.isfinite(value) else Refused(f"it returned {value}, must be a finite number")


def _describe(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"

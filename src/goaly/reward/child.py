"""The program of a verifier process: `python -m goaly.reward.child package.module:function PARENT_PID`.

Scores pairs of prompt and response from its standard input, one after the other, until the input ends. Standard output
carries the replies, so output of the verifier goes to standard error. It imports nothing heavy itself.

Invariant
    reward-2: The process dies with its parent, even while the verifier is running.
"""

import ctypes
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from goaly.base.dotted_path import function_at
from goaly.reward.frames import Refused, encode_message, read_message

_PR_SET_PDEATHSIG = 1


def main(verifier: str, parent_pid: int) -> None:
    """Serve until standard input ends."""
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C: it closes the input or kills this process
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which subprocesses of the verifier inherit
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        _detach_standard_streams()
        try:
            function = verifier_at(verifier)
        except Exception as error:
            replies.write(encode_message(Refused(_describe(error))))
            return
        replies.write(encode_message(None))
        replies.flush()
        while (pairs := read_message(requests)) is not None:
            for prompt, response in pairs:
                replies.write(encode_message(_judge(function, prompt, response)))
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


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends for any reason (reward-2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _detach_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

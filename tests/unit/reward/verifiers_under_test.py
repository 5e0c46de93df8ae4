"""Verifiers that do what a test needs; they run in the pool's child processes."""

import os
import signal
import subprocess
import sys
import time


def length(prompt, response: str) -> float:
    """The number of characters."""
    return float(len(response))


def by_word(prompt, response: str) -> float:
    """What the response says: hang, raise, die, nan, heavy; else 1."""
    match response:
        case "hang":
            time.sleep(1000)
        case "spawn and hang":
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1000)  # {prompt.answer}"])
            time.sleep(1000)
        case "raise":
            raise LookupError("no such answer")
        case "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return float("nan")
        case "heavy":
            return float("torch" in sys.modules)
        case "print":
            print("a verifier may print")
        case "pid":
            return float(os.getpid())
    return 1.0


def by_answer(prompt, response: str) -> float:
    """What the prompt's answer says, as in `by_word`; else the number of digits in the response."""
    if prompt.answer in ("hang", "raise"):
        return by_word(prompt, prompt.answer)
    return float(sum(letter.isdigit() for letter in response))


NOT_A_FUNCTION = 3


async def asks_elsewhere(prompt, response: str) -> float:
    """A coroutine function."""
    return 1.0


def of_response(response: str) -> float:
    """A function of one argument."""
    return 1.0


def returns(prompt, response: str):
    """Nothing."""


def returns_text(prompt, response: str):
    """Not a number."""
    return "right"


def exits(prompt, response: str) -> float:
    """No return."""
    os._exit(3)


def hangs(prompt, response: str) -> float:
    """No end."""
    time.sleep(1000)
    return 1.0


def raises(prompt, response: str) -> float:
    """An error, to which the response may have led."""
    raise LookupError(response)

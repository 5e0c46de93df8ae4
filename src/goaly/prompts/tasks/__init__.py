"""The tasks that goaly brings along: each makes its own problems, writes their solutions and verifies answers.

A task never touches files or the network: every problem comes out of the random generator it is given.
"""

from random import Random
from typing import Protocol

from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import TASK_NAMES, ArithmeticSettings
from goaly.prompts.tasks.arithmetic import Arithmetic


class Task(Protocol):
    """A source of verifiable problems without end."""

    @property
    def name(self) -> str:
        """What prompts carry as their `source`."""
        ...

    @property
    def fingerprint(self) -> str:
        """What tells one setting of the task from another: streams refuse to resume under a different one."""
        ...

    def problem(self, random: Random) -> Prompt:
        """A problem, by the generator's draws alone."""
        ...

    def demonstration(self, prompt: Prompt, random: Random) -> str:
        """A written-out answer to imitate; it may be wrong where the teacher is not perfect."""
        ...

    def verify(self, prompt: Prompt, response: str) -> float:
        """The reward of a response."""
        ...


def build_task(name: str, arithmetic: ArithmeticSettings, *, forgotten_carry_rate: float = 0.0) -> Task:
    """The built-in task of this name."""
    if name not in TASK_NAMES:
        raise ValueError(f"task={name}: must be one of {', '.join(TASK_NAMES)}")
    return Arithmetic(arithmetic, forgotten_carry_rate=forgotten_carry_rate)


__all__ = ["Arithmetic", "Task", "build_task"]

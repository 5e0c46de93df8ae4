"""Built-in tasks: each makes problems, writes demonstrations and verifies answers.

A task uses no files and no network: every problem comes from the given random generator.
"""

from random import Random
from typing import Protocol

from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import TASK_NAMES, ArithmeticSettings
from goaly.prompts.tasks.arithmetic import Arithmetic


class Task(Protocol):
    """An endless source of verifiable problems."""

    @property
    def name(self) -> str:
        """The `source` of its prompts."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the settings of the task; streams refuse to resume with another fingerprint."""
        ...

    def problem(self, random: Random) -> Prompt:
        """A problem that depends only on the random generator."""
        ...

    def demonstration(self, prompt: Prompt, random: Random) -> str:
        """A written-out answer to imitate; it may be wrong if the teacher is imperfect."""
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

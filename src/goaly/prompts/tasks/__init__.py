"""The tasks that goaly brings along: each makes its own problems, writes their solutions and verifies answers.

A task never touches files or the network: every problem comes out of the random generator it is given.
"""

from collections.abc import Mapping
from random import Random
from typing import Protocol

from goaly.prompts.prompt import Prompt
from goaly.prompts.settings import ArithmeticSettings, PromptSettings
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

    def solution(self, prompt: Prompt, random: Random) -> str:
        """A written-out answer to imitate."""
        ...

    def verify(self, prompt: Prompt, response: str) -> float:
        """The reward of a response."""
        ...

    def size_of(self, prompt: Prompt) -> str:
        """How big the problem is: evaluations report by it."""
        ...


TASKS: Mapping[str, type[Arithmetic]] = {"arithmetic": Arithmetic}


def build_task(settings: PromptSettings) -> Task:
    """The built-in task that the settings name."""
    if settings.task not in TASKS:
        raise ValueError(f"prompts.task={settings.task!r}: unknown; built in: {', '.join(TASKS)}")
    return Arithmetic(settings.arithmetic)


__all__ = ["TASKS", "Arithmetic", "ArithmeticSettings", "Task", "build_task"]

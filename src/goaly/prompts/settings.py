"""Where prompts come from, and how they are split."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

FILE_KINDS = (".jsonl", ".parquet")
TASK_NAMES = ("arithmetic",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """The built-in addition task."""

    min_digits: int = 2
    """Fewest digits of a number."""
    max_digits: int = 8
    """Most digits of a number."""
    weight_power: float = 1.5
    """A number of digits d is drawn with weight 1 / d ** weight_power: the higher, the rarer long problems are."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot."""
        found = []
        if self.min_digits < 1:
            found.append(f"{prefix}min_digits={self.min_digits}: must be at least 1")
        if self.max_digits < self.min_digits:
            found.append(f"{prefix}max_digits={self.max_digits}: must be at least min_digits={self.min_digits}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Where prompts come from: a built-in task, or files."""

    task: str | None = "arithmetic"
    """The built-in task that makes the prompts; null when they come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts: `messages` or `prompt` in each record, and what the verifier needs
    (`answer`); other columns become the prompt's metadata."""
    held_out_fraction: float = 0.1
    """Share of the problems that is never trained on: evaluations draw from it. Chosen by a hash of the problem."""
    seed: int = 0
    """Decides which prompts come, and in which order."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `prompts.`."""
        found = source_problems(self.task, self.files, prefix)
        if not 0 <= self.held_out_fraction < 1:
            found.append(f"{prefix}held_out_fraction={self.held_out_fraction}: must be at least 0 and below 1")
        return found


def source_problems(task: str | None, files: tuple[str, ...], prefix: str) -> list[str]:
    """What can't work about a choice between a task and files."""
    found = []
    if task is None and not files:
        found.append(f"{prefix}files=[]: must name at least one file where {prefix}task is null")
    if task is not None and files:
        found.append(f"{prefix}task={task}: must be null where {prefix}files are given")
    if task is not None and task not in TASK_NAMES:
        found.append(f"{prefix}task={task}: must be one of {', '.join(TASK_NAMES)}")
    for name in files:
        if not name.endswith(FILE_KINDS):
            found.append(f"{prefix}files: {name} must end in {' or '.join(FILE_KINDS)}")
        elif not Path(name).is_file():
            found.append(f"{prefix}files: {name} is not there")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings:
    """What supervised training imitates: a built-in task's demonstrations, or the documents of files."""

    task: str | None = None
    """A built-in task whose demonstrations are imitated; null when documents come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    forgotten_carry_rate: float = 0.0
    """Share of the carries that the addition task's demonstrations forget. Above one half, imitation makes a policy
    whose likeliest answer is wrong: that carries count is then left to RL."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files: each record has `messages` (a chat; its assistant messages are trained), or `prompt` and
    `completion`."""
    template: Literal["chat", "plain"] = "chat"
    """How `prompt` and `completion` are written: as a user's and the assistant's message, or as they are."""
    held_out_fraction: float = 0.1
    """Share of a task's problems that is never demonstrated; the same hash of the problem as `prompts` splits by."""
    seed: int = 0
    """Decides the order of the documents."""
    row_length: int = 512
    """Tokens of a packed row; no document is split."""
    rows_per_step: int = 4
    """Packed rows of one optimizer step."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """What becomes of a file's document that is longer than a row."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `data.`."""
        found = source_problems(self.task, self.files, prefix)
        if not 0 <= self.forgotten_carry_rate <= 1:
            found.append(f"{prefix}forgotten_carry_rate={self.forgotten_carry_rate}: must be at least 0 and at most 1")
        if not 0 <= self.held_out_fraction < 1:
            found.append(f"{prefix}held_out_fraction={self.held_out_fraction}: must be at least 0 and below 1")
        for name in ("row_length", "rows_per_step"):
            if getattr(self, name) < 1:
                found.append(f"{prefix}{name}={getattr(self, name)}: must be at least 1")
        return found

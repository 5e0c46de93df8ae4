"""Where prompts come from, and how they are split."""

from dataclasses import dataclass, field

FILE_KINDS = (".jsonl", ".parquet")
TASK_NAMES = ("arithmetic",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """The built-in addition task."""

    min_digits: int = 2
    """Fewest digits of a number."""
    max_digits: int = 10
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
    from pathlib import Path

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

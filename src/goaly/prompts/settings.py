"""Settings of the prompts stage: where prompts come from, how they are split, and supervised data."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ArithmeticSettings:
    """The built-in addition task."""

    min_digits: int = 1
    """Fewest digits of a number."""
    max_digits: int = 8
    """Most digits of a number."""
    weight_power: float = 1.0
    """A number of digits d is drawn with weight 1 / d ** weight_power: the higher, the rarer long problems are."""
    mistake_rate: float = 0.0
    """Share of steps that demonstrations get wrong (supervised data only): imperfect teachers leave room for RL."""

    def problems(self, prefix: str) -> list[str]:
        """What is wrong with these settings, a line each."""
        found = []
        if self.min_digits < 1:
            found.append(f"{prefix}.min_digits={self.min_digits}: must be at least 1")
        if self.max_digits < self.min_digits:
            found.append(f"{prefix}.max_digits={self.max_digits}: must be at least min_digits={self.min_digits}")
        if not 0 <= self.mistake_rate < 1:
            found.append(f"{prefix}.mistake_rate={self.mistake_rate}: must be in [0, 1)")
        return found


@dataclass(kw_only=True)
class PromptSettings:
    """Where prompts come from: a built-in task, or files."""

    task: str | None = "arithmetic"
    """The built-in task that makes the prompts; null when they come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    files: list[str] = field(default_factory=list)
    """JSONL or Parquet files of prompts: `messages` or `prompt` in each record, and what the verifier needs
    (`answer`); other columns become the prompt's metadata."""
    held_out_fraction: float = 0.1
    """Share of the problems that is never trained on: evaluations draw from it. Chosen by a hash of the problem."""
    seed: int = 0
    """Decides which prompts come, and in which order."""

    def problems(self, prefix: str) -> list[str]:
        """What is wrong with these settings, a line each."""
        found = self.arithmetic.problems(f"{prefix}.arithmetic")
        if self.task is None and not self.files:
            found.append(f"{prefix}.files=[]: name at least one file, or set {prefix}.task")
        if self.task is not None and self.files:
            found.append(f"{prefix}.task={self.task!r}: must be null when {prefix}.files are given")
        if self.task not in (None, "arithmetic"):
            found.append(f"{prefix}.task={self.task!r}: unknown; built in: arithmetic")
        if not 0 <= self.held_out_fraction < 1:
            found.append(f"{prefix}.held_out_fraction={self.held_out_fraction}: must be in [0, 1)")
        found += [f"{prefix}.files: {name}: must end in .jsonl or .parquet" for name in self.files if not _known(name)]
        return found


def _known(name: str) -> bool:
    return name.endswith((".jsonl", ".parquet"))

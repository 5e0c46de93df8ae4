"""Sources of prompts and of supervised documents, and their chat templates."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, MinLen

from goaly.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Share, ShareBelowOne, settings
from goaly.config.wording import idle

FILE_KINDS = (".jsonl", ".parquet")
TASK_NAMES = ("arithmetic",)


@settings
class ArithmeticSettings:
    """The built-in addition task."""

    min_digits: PositiveInt = 2
    """Fewest digits of a number."""
    max_digits: int = 12
    """Most digits of a number."""
    weight_power: float = 1.5
    """A length of d digits is drawn with weight 1 / d ** weight_power: a higher power makes long problems rarer."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each combination that cannot work. `prefix` is the section's path with its dot."""
        if self.max_digits < self.min_digits:
            return [f"{prefix}max_digits={self.max_digits}: must be at least {prefix}min_digits={self.min_digits}"]
        return []


@settings
class SourceSettings:
    """One of several sources of prompts."""

    name: Annotated[str, MinLen(1)]
    """Name of the source: its prompts carry it, and metrics are reported by it."""
    weight: NonNegativeFloat = 1.0
    """Its share of the prompts, relative to the other sources' weights."""
    task: str | None = None
    """The built-in task that makes its prompts; null if they come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot."""
        return source_problems(self.task, self.files, self.arithmetic, prefix)


@settings
class CurriculumSettings:
    """Weights sources by how much the policy can learn from them. A sample passes with a reward of 1 or more."""

    floor: Annotated[float, Gt(0), Le(1)] = 0.1
    """Lower bound of the factor 4 * p * (1 - p), which is 1 for a source that half of the samples pass."""
    half_life_samples: PositiveFloat = 512.0
    """Number of newer samples of the source after which a sample counts half in its pass rate."""


@settings
class PromptSettings:
    """Source of the prompts: a built-in task, files, or several such sources."""

    task: str | None = "arithmetic"
    """The built-in task that makes the prompts; null if they come from `files` or `sources`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts. Each record has `messages` or `prompt`, perhaps an `answer` for the verifier
    and `tools` that the policy may call; other columns become the prompt's metadata."""
    sources: tuple[SourceSettings, ...] = ()
    """Several sources and their weights, such as `[{name: sums, task: arithmetic}, {name: own, files: [a.jsonl]}]`. A
    script may change the weights during the run: `run.prompts.set_weights({"own": 2})`."""
    curriculum: CurriculumSettings | None = None
    """Multiply the weight of each of `sources` by 4 * p * (1 - p), where p is its recent pass rate; null keeps the
    weights."""
    held_out_fraction: ShareBelowOne = 0.1
    """Share of the problems that is never trained on, for evaluations. A hash of the user's messages decides (or of the
    column `split_key`, if a record has one), so supervised training with the same fraction holds out the same
    problems."""
    seed: int = 0
    """Seeds the choice and the order of prompts."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, `prompts.`."""
        if self.sources:
            found = self._mixture_problems(prefix)
        else:
            found = source_problems(self.task, self.files, self.arithmetic, prefix)
        if self.curriculum is not None and len(self.sources) < 2:
            found.append(f"{prefix}curriculum: needs at least two {prefix}sources to choose between")
        return found

    def _mixture_problems(self, prefix: str) -> list[str]:
        found = []
        if self.task is not None:
            found.append(f"{prefix}task={self.task}: must be null where {prefix}sources are given")
        if self.files:
            found.append(f"{prefix}files: must be empty where {prefix}sources are given")
        found += idle(self.arithmetic, f"{prefix}arithmetic.", f"{prefix}sources have their own")
        names = [source.name for source in self.sources]
        if double := sorted({name for name in names if names.count(name) > 1}):
            found.append(f"{prefix}sources: each must have a name of its own; more than one is {', '.join(double)}")
        if not any(source.weight for source in self.sources):
            found.append(f"{prefix}sources: one must have a weight above 0")
        return found


def source_problems(task: str | None, files: tuple[str, ...], arithmetic: ArithmeticSettings, prefix: str) -> list[str]:
    """One line for each reason why this task or these files cannot be a source of problems."""
    found = [] if task is not None else idle(arithmetic, f"{prefix}arithmetic.", f"{prefix}task is null")
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
            found.append(f"{prefix}files: {name} does not exist")
    return found


@settings
class ChatSettings:
    """The chat template that turns chats into text."""

    template_file: str | None = None
    """A Jinja file with the chat template; null is the template in the model's folder."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the template, such as `{enable_thinking: false}` for Qwen3."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, such as `chat.`."""
        found = []
        if self.template_file is not None and not Path(self.template_file).is_file():
            found.append(f"{prefix}template_file={self.template_file}: does not exist, must be a Jinja file")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in self.template_args:
                found.append(
                    f"{prefix}template_args.{name}: must have another name, this argument is set from the chat"
                )
        return found


@settings
class SupervisedSettings:
    """Documents of supervised training: demonstrations of a built-in task, or those of files."""

    task: str | None = None
    """The built-in task that makes the demonstrations; null if documents come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    forgotten_carry_rate: Share = 0.0
    """Share of the carries that demonstrations of the addition task forget. Above one half, the most likely answer of
    the trained policy is wrong, and RL has to teach it to carry."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files. Each record has `messages` (a chat, whose assistant messages are trained), or `prompt`
    and `completion`."""
    template: Literal["chat", "plain"] = "chat"
    """Write `prompt` and `completion` as messages of the user and the assistant (`chat`), or as they are (`plain`)."""
    held_out_fraction: ShareBelowOne = 0.1
    """Share of the problems that is never trained on: the same problems as in a run with this
    `prompts.held_out_fraction`. Set it to the value of the RL run that follows, or to 0 if none does."""
    seed: int = 0
    """Seeds the order of the documents."""
    row_length: PositiveInt = 512
    """Tokens of a packed row; no document is split."""
    rows_per_step: PositiveInt = 4
    """Packed rows of one optimizer step."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """A document of a file that is longer than a row is an error (`refuse`) or left out (`skip`)."""

    def problems(self, prefix: str) -> list[str]:
        """One line for each setting that cannot work. `prefix` is the section's path with its dot, such as `data.`."""
        found = source_problems(self.task, self.files, self.arithmetic, prefix)
        if self.task is None:
            return found + idle(self, prefix, f"{prefix}task is null", "forgotten_carry_rate")
        return found + idle(self, prefix, f"documents come from {prefix}task", "template", "too_long")

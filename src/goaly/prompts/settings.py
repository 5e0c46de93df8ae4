"""Where prompts come from, and how they are split."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from goaly.configuration.schema import KnownWords, changed, show

FILE_KINDS = (".jsonl", ".parquet")
TASK_NAMES = ("arithmetic",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """The built-in addition task."""

    min_digits: int = 2
    """Fewest digits of a number."""
    max_digits: int = 12
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

    def idle(self, prefix: str, why: str) -> list[str]:
        """A line for each key that is set although nothing uses it, because of `why`."""
        return [f"{prefix}{key}={show(value)}: has no effect, {why}" for key, value in changed(self).items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """One of several sources of prompts."""

    name: str
    """What its prompts carry as their source; metrics are reported by it."""
    weight: float = 1.0
    """Its share of the prompts, in proportion to the other sources' weights."""
    task: str | None = None
    """The built-in task that makes its prompts; null when they come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot."""
        found = source_problems(self.task, self.files, self.arithmetic, prefix)
        if not self.name:
            found.append(f"{prefix}name={self.name}: must not be empty")
        if not 0 <= self.weight < float("inf"):
            found.append(f"{prefix}weight={self.weight}: must be a number of at least 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """Weighs sources by how much the policy can learn from them: by p * (1 - p), p being the recent pass rate. A sample
    passes at a reward of 1 or more; a source of which none ever gets so much stays at the floor."""

    floor: float = 0.1
    """Least factor of a source's weight, where 1 is that of a source that every other sample passes."""
    half_life_samples: float = 512.0
    """A sample counts half as much in its source's pass rate as soon as so many newer ones finished."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot."""
        found = []
        if not 0 < self.floor <= 1:
            found.append(f"{prefix}floor={self.floor}: must be above 0 and at most 1")
        if not 0 < self.half_life_samples < float("inf"):
            found.append(f"{prefix}half_life_samples={self.half_life_samples}: must be a number above 0")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Where prompts come from: a built-in task, files, or several such sources."""

    task: str | None = "arithmetic"
    """The built-in task that makes the prompts; null when they come from `files` or `sources`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts: `messages` or `prompt` in each record, what the verifier needs (`answer`), and
    the `tools` that the policy may call; other columns become the prompt's metadata."""
    sources: tuple[SourceSettings, ...] = ()
    """Several sources and their shares, such as `[{name: sums, task: arithmetic}, {name: own, files: [a.jsonl]}]`. A
    script may change the shares while the run goes on: `run.prompts.set_weights({"own": 2})`."""
    curriculum: CurriculumSettings | None = None
    """Let the policy's pass rates move the shares of `sources`."""
    held_out_fraction: float = 0.1
    """Share of the problems that is never trained on: evaluations draw from it. A hash of what the user asks decides
    (or of the column `split_key`, where records have one), so that supervised training with the same share holds out
    the same problems."""
    seed: int = 0
    """Decides which prompts come, and in which order."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `prompts.`."""
        if self.sources:
            found = self._mixture_problems(prefix)
        else:
            found = source_problems(self.task, self.files, self.arithmetic, prefix)
        if self.curriculum is not None and len(self.sources) < 2:
            found.append(f"{prefix}curriculum: needs at least two {prefix}sources to choose between")
        if not 0 <= self.held_out_fraction < 1:
            found.append(f"{prefix}held_out_fraction={self.held_out_fraction}: must be at least 0 and below 1")
        return found

    def _mixture_problems(self, prefix: str) -> list[str]:
        found = []
        if self.task is not None:
            found.append(f"{prefix}task={self.task}: must be null where {prefix}sources are given")
        if self.files:
            found.append(f"{prefix}files: must be empty where {prefix}sources are given")
        found += self.arithmetic.idle(f"{prefix}arithmetic.", f"{prefix}sources have their own")
        names = [source.name for source in self.sources]
        if double := sorted({name for name in names if names.count(name) > 1}):
            found.append(f"{prefix}sources: each must have a name of its own; more than one is {', '.join(double)}")
        if not any(source.weight for source in self.sources):
            found.append(f"{prefix}sources: one must have a weight above 0")
        return found


def source_problems(task: str | None, files: tuple[str, ...], arithmetic: ArithmeticSettings, prefix: str) -> list[str]:
    """What can't work about a choice between a task and files."""
    found = [] if task is not None else arithmetic.idle(f"{prefix}arithmetic.", f"{prefix}task is null")
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
class ChatSettings:
    """How chats become text: by the chat template of the model's folder, unless this says otherwise."""

    template_file: str | None = None
    """A Jinja file that is used instead of the folder's chat template."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """What the template is given beside the chat, such as `{enable_thinking: false}` for Qwen3."""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `chat.`."""
        found = []
        if self.template_file is not None and not Path(self.template_file).is_file():
            found.append(f"{prefix}template_file={self.template_file}: is not there, must be a Jinja file")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in self.template_args:
                found.append(f"{prefix}template_args.{name}: must have another name, the chat itself gives it")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings(KnownWords):
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
    """Share of the problems that is never imitated: those that `prompts.held_out_fraction` of the same value holds out,
    of a task and of files alike. Set it to that value of the RL run that follows; to 0 where none does."""
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
        found = source_problems(self.task, self.files, self.arithmetic, prefix)
        if self.task is None and self.forgotten_carry_rate:
            rate = f"{prefix}forgotten_carry_rate={self.forgotten_carry_rate}"
            found.append(f"{rate}: has no effect, {prefix}task is null")
        for name in ("template", "too_long") if self.task is not None else ():
            if name in (given := changed(self)):
                found.append(f"{prefix}{name}={given[name]}: has no effect, documents come from {prefix}task")
        if not 0 <= self.forgotten_carry_rate <= 1:
            found.append(f"{prefix}forgotten_carry_rate={self.forgotten_carry_rate}: must be at least 0 and at most 1")
        if not 0 <= self.held_out_fraction < 1:
            found.append(f"{prefix}held_out_fraction={self.held_out_fraction}: must be at least 0 and below 1")
        for name in ("row_length", "rows_per_step"):
            if getattr(self, name) < 1:
                found.append(f"{prefix}{name}={getattr(self, name)}: must be at least 1")
        return found

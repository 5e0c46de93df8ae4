"""Sources of prompts and of supervised documents, and their chat templates."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, MinLen

from goaly.base.config.settings import NonNegativeFloat, PositiveInt, Section, Settings, Share, ShareBelowOne
from goaly.base.registry import function_at

FILE_KINDS = (".jsonl", ".parquet")
ARITHMETIC = "arithmetic"
REASONING_GYM = "reasoning_gym"
SCORING = "goaly.prompts.tasks.reasoning_gym:verify"
"""The verifier of its data sets' own scoring."""
CODING_READER = "goaly.coding.task_files:read_prompts"
"""The reader of coding tasks."""
TASK_NAMES = (ARITHMETIC, REASONING_GYM)
"""The built-in tasks. Each has a section of its own name."""


class ArithmeticSettings(Settings):
    """The built-in addition task."""

    min_digits: PositiveInt = 2
    """Fewest digits of a number."""
    max_digits: int = 12
    """Most digits of a number."""
    weight_power: float = 1.5
    """A length of d digits is drawn with weight 1 / d ** weight_power: a higher power makes long problems rarer."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.max_digits < self.min_digits:
            yield f"{at.max_digits}: must be at least {at.min_digits}"


class ReasoningGymSettings(Settings):
    """A data set of the package reasoning-gym (`pip install 'goaly[reasoning-gym]'`)."""

    name: str | None = None
    """Name of the data set, such as `chain_sum`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this data set, such as `{max_terms: 4}`."""
    size: PositiveInt = 100_000
    """Number of its problems, from which prompts are drawn."""
    seed: int = 0
    """Seeds the problems."""
    wording: str = "{question}"
    """The user's message: `{question}` becomes the problem's. The verifier reads the last `<answer>...</answer>` of a
    response, or all of it: `"{question}\n\nGive the answer as <answer>...</answer>."` lets the policy think first."""

    def _problems(self, at: Section) -> Iterator[str]:
        if "{question}" not in self.wording:
            yield f"{at.wording}: must contain {{question}}, which becomes the question of the problem"
        if both := sorted({"name", "seed", "size"} & self.options.keys()):
            yield f"{at}options: {', '.join(both)} must be set beside them, as {at}{both[0]}"
        elif self.name is not None:
            try:
                from goaly.prompts.tasks.reasoning_gym import problem_with  # imports many packages
            except ImportError as error:
                yield f"{at.name}: {error}"
            else:
                if (why := problem_with(self.name, self.data_set)) is not None:
                    yield f"{at.name}: {why}"

    @property
    def data_set(self) -> str:
        """The arguments that make the data set, as JSON."""
        return json.dumps({"name": self.name, "seed": self.seed, "size": self.size, **self.options}, sort_keys=True)


class ColumnSettings(Settings):
    """The columns that files have. A dot leads into a column: `reward_model.ground_truth`."""

    prompt: str | None = None
    """Column of the prompt, a text or a list of {role, content}; null: `messages`, or else `prompt`."""
    wording: str = "{prompt}"
    """The user's message, if the prompt is a text: `{prompt}` becomes the text. Set it to ask for a form of the answer,
    such as `"{prompt}\n\nPut the answer in \\boxed{}."`."""
    answer: str = "answer"
    """Column of the answer for the verifier."""
    id: str = "id"
    """Column of the prompt's id; a record without it gets a hash of its messages."""
    source: str = "source"
    """Column of the prompt's source; a record without it has the name of its file."""

    def _problems(self, at: Section) -> Iterator[str]:
        if "{prompt}" not in self.wording:
            yield f"{at.wording}: must contain {{prompt}}, which becomes the text of the problem"


class ProblemSettings(Settings):
    """One source of problems: a built-in task or files."""

    task: str | None = None
    """The built-in task that makes the prompts, `arithmetic` or `reasoning_gym`; null if they come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    reasoning_gym: ReasoningGymSettings = field(default_factory=ReasoningGymSettings)
    """The data set, if `task` is reasoning_gym. Set `reward.verifier` to `goaly.prompts.tasks.reasoning_gym:verify`."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts. Each record has `messages` or `prompt`, perhaps an `answer` for the verifier
    and `tools` that the policy may call; other columns become the prompt's metadata."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    """Names of the columns of `files`."""
    reader: str | None = None
    """Function that reads one of `files`, which may be of any form then, or folders: `package.module:function`. It gets
    the path, and returns the prompts of it. Coding tasks have `goaly.coding.task_files:read_prompts`; null reads JSONL
    and Parquet."""
    distinct: bool = False
    """Give each problem of a file once a pass, even if the file repeats it, and keep all its different problems in
    memory. Set it for files such as DAPO-Math-17k, which has each of its problems a hundred times."""

    def of_source(self) -> dict[str, Any]:
        """The values of these keys, which are the whole source."""
        return {one.name: getattr(self, one.name) for one in fields(ProblemSettings)}


class SourceSettings(ProblemSettings):
    """One of several sources of prompts."""

    name: Annotated[str, MinLen(1)]
    """Name of the source: its prompts carry it, and metrics are reported by it."""
    weight: NonNegativeFloat = 1.0
    """Its share of the prompts, relative to the other sources' weights."""

    def _problems(self, at: Section) -> Iterator[str]:
        yield from source_problems(self, at)
        yield from file_key_problems(self, at)


class CurriculumSettings(Settings):
    """Weights sources by how much the policy can learn from them. A sample passes with a reward of 1 or more."""

    floor: Annotated[float, Gt(0), Le(1)] = 0.1
    """Lower bound of the factor 4 * p * (1 - p), which is 1 for a source that half of the samples pass."""
    half_life_samples: Annotated[float, Gt(0)] = 512.0
    """Number of newer samples of the source after which a sample counts half in its pass rate."""


class PromptSettings(ProblemSettings):
    """Source of the prompts: a built-in task, files, or several such sources."""

    task: str | None = ARITHMETIC
    """The built-in task that makes the prompts, `arithmetic` or `reasoning_gym`; null if they come from `files` or
    `sources`."""
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

    def _problems(self, at: Section) -> Iterator[str]:
        yield from self._mixture_problems(at) if self.sources else source_problems(self, at)
        yield from file_key_problems(self, at)
        if self.curriculum is not None and len(self.sources) < 2:
            yield f"{at}curriculum: needs at least two {at}sources to choose between"

    def _mixture_problems(self, at: Section) -> Iterator[str]:
        if self.task is not None:
            yield f"{at.task}: must be null where {at}sources are given"
        if self.files:
            yield f"{at}files: must be empty where {at}sources are given"
        for task in TASK_NAMES:
            yield from getattr(at, task).idle(f"{at}sources have their own")
        names = [source.name for source in self.sources]
        if double := sorted({name for name in names if names.count(name) > 1}):
            yield f"{at}sources: each must have a name of its own; more than one is {', '.join(double)}"
        if not any(source.weight for source in self.sources):
            yield f"{at}sources: one must have a weight above 0"


def source_problems(source: Any, at: Section, tasks: Sequence[str] = TASK_NAMES) -> Iterator[str]:
    """One line for each reason why the task, one of `tasks`, or the files of this section cannot be a source of
    problems."""
    task, files = source.task, source.files
    yield from idle_tasks(task, at, tasks)
    if task is None:
        if not files:
            yield f"{at.files}: must name at least one file where {at}task is null"
    elif files:
        yield f"{at.task}: must be null where {at}files are given"
    if task is not None and task not in tasks:
        yield f"{at.task}: must be one of {', '.join(tasks)}"
    elif task == REASONING_GYM and source.reasoning_gym.name is None:
        yield f"{at.reasoning_gym.name}: must name a data set where {at}task is {REASONING_GYM}"
    for name in files:
        if getattr(source, "reader", None) is None and not name.endswith(FILE_KINDS):
            reads = f"; for coding tasks {at}reader must be {CODING_READER}" if Path(name).is_dir() else ""
            yield f"{at}files: {name} must end in {' or '.join(FILE_KINDS)}{reads}"


def absent_files(settings: Any, at: Section) -> Iterator[str]:
    """One line for each data file of this section, and of the sources and sets in it, that does not exist."""
    reads_all = getattr(settings, "reader", None) is not None
    for name in getattr(settings, "files", ()):
        if not Path(name).exists() if reads_all else name.endswith(FILE_KINDS) and not Path(name).is_file():
            yield f"{at}files: {name} does not exist"
    inner = {f"{at}sources.{number}.": one for number, one in enumerate(getattr(settings, "sources", ()))}
    inner |= {f"{at}sets.{name}.": one for name, one in getattr(settings, "sets", {}).items()}
    for path, one in inner.items():
        yield from absent_files(one, Section(one, path))


def idle_tasks(task: str | None, at: Section, tasks: Sequence[str] = TASK_NAMES) -> Iterator[str]:
    """One line for each key of `at` that is about a task other than this one."""
    for other in tasks:
        if other != task and (task is None or task in tasks):
            yield from getattr(at, other).idle(f"{at}task is {'null' if task is None else task}")


def file_key_problems(source: Any, at: Section) -> Iterator[str]:
    """One line for each key of `at` that is about files and cannot work."""
    if not source.files:
        yield from at.idle(f"{at}files is empty", "distinct", "reader")
        yield from at.columns.idle(f"{at}files is empty")
    elif source.reader is not None:
        yield from at.idle(f"{at}reader reads the files", "distinct")
        yield from at.columns.idle(f"{at}reader reads the files")
        try:
            function_at(source.reader)
        except Exception as error:  # whatever a user's module raises when it is imported
            yield f"{at.reader}: cannot be imported ({type(error).__name__}: {error}), must be package.module:function"


class ChatSettings(Settings):
    """The chat template that turns chats into text, and the parsers that read messages in answers."""

    template_file: str | None = None
    """A Jinja file with the chat template; null is the template in the model's folder."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the template, such as `{enable_thinking: false}` for Qwen3."""
    tool_parser: str | None = None
    """vLLM's parser of tool calls, such as `hermes`, for episodes that chat; null leaves them in the text."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, such as `qwen3`, for episodes that chat; null leaves it in the text."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.template_file is not None and not Path(self.template_file).is_file():
            yield f"{at.template_file}: does not exist, must be a Jinja file"
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in self.template_args:
                yield f"{at}template_args.{name}: must have another name, this argument is set from the chat"
        if self.tool_parser is not None:
            from vllm.tool_parsers import ToolParserManager  # imports torch

            yield from _unknown_parser(at.tool_parser, self.tool_parser, ToolParserManager.list_registered())
        if self.reasoning_parser is not None:
            from vllm.reasoning import ReasoningParserManager

            known = ReasoningParserManager.list_registered()
            yield from _unknown_parser(at.reasoning_parser, self.reasoning_parser, known)


def _unknown_parser(setting: str, name: str, known: Collection[str]) -> Iterator[str]:
    if name not in known:
        yield f"{setting}: vLLM has no such parser, must be one of {', '.join(sorted(known))}"


class SupervisedSettings(Settings):
    """Documents of supervised training: demonstrations of a built-in task, or those of files."""

    task: str | None = None
    """The built-in task that makes the demonstrations; null if documents come from `files`."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    forgotten_carry_rate: Share = 0.0
    """Share of the carries that demonstrations of the addition task forget. Above one half, the most likely answer of
    the trained policy is wrong, and RL has to teach it to carry."""
    hinted_share: Share = 0.0
    """Share of the demonstrations whose question begins with its answer and a bar, as a hint; these forget no carry.
    For policies that teach themselves (`configs/distill/self.yaml`)."""
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

    def _problems(self, at: Section) -> Iterator[str]:
        yield from source_problems(self, at, [ARITHMETIC])
        yield from absent_files(self, at)
        if self.task is None:
            yield from at.idle(f"{at}task is null", "forgotten_carry_rate", "hinted_share")
        else:
            yield from at.idle(f"documents come from {at}task", "template", "too_long")

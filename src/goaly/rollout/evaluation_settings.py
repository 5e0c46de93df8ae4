"""Evaluation settings, the same for a run and for `apps/eval`."""

import re
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

from goaly.base.config.settings import PositiveInt, Section, Settings
from goaly.generate.settings import SamplingSettings
from goaly.prompts.prompt import Split
from goaly.prompts.settings import (
    ArithmeticSettings,
    ColumnSettings,
    PromptSettings,
    ReasoningGymSettings,
    absent_files,
    file_key_problems,
    idle_tasks,
    source_problems,
)
from goaly.reward.settings import verifier_problems

HELD_OUT = "held_out"
"""Name of the only set where `sets` is empty."""


class EvaluationSet(Settings):
    """Problems of an evaluation: of a task, of files, or the held-out share of `prompts`."""

    task: str | None = None
    """The built-in task that makes the problems. Only held-out problems are asked, if the run trains on the task."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, if `task` is arithmetic."""
    reasoning_gym: ReasoningGymSettings = field(default_factory=ReasoningGymSettings)
    """The data set, if `task` is reasoning_gym, with `verifier: goaly.prompts.tasks.reasoning_gym:verify`."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files in the format of `prompts.files`; any problem in them may be asked. Without `task` and
    `files` the set is the held-out share of `prompts`."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    """Names of the columns of `files`."""
    reader: str | None = None
    """Function that reads `files`, as `prompts.reader`."""
    prompts: PositiveInt | Literal["all"] = "all"
    """Number of problems, each of which is asked once; "all": all problems of the files. A task needs a number."""
    samples_per_prompt: PositiveInt = 1
    """Answers sampled for each problem. pass@k needs at least k of them."""
    pass_at: tuple[int, ...] = ()
    """Values of k for which pass@k is reported, beside pass@1; empty: the powers of two up to `samples_per_prompt`, and
    `samples_per_prompt` itself. avg@n, the mean reward, is over all n samples."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Keys of `sampling` that differ for this set, such as `{temperature: 0.6, top_p: 0.95, max_tokens: 512}`."""
    verifier: str | None = None
    """Function that scores the answers, as `package.module:function`; null is `reward.verifier`. It runs in
    `reward.workers` processes of its own, with the limits of `reward`."""

    @property
    def count(self) -> int | None:
        """The number of problems; None is all."""
        return None if self.prompts == "all" else self.prompts

    def source(self, prompts: PromptSettings) -> tuple[PromptSettings, Split]:
        """The source of the problems and the split of it that is asked, in a run that trains on `prompts`."""
        if self.files:
            of_files = {"files": self.files, "columns": self.columns, "reader": self.reader}
            return PromptSettings(task=None, **of_files, held_out_fraction=0.0), Split.TRAIN
        if self.task is None:
            return prompts, Split.HELD_OUT
        fraction = prompts.held_out_fraction  # a problem's split depends on the problem and the fraction alone
        source = PromptSettings(
            task=self.task,
            arithmetic=self.arithmetic,
            reasoning_gym=self.reasoning_gym,
            held_out_fraction=fraction,
        )
        return source, Split.HELD_OUT if fraction > 0 else Split.TRAIN

    def sampled(self, sampling: SamplingSettings) -> SamplingSettings:
        """The sampling parameters of this set, if `sampling` has those of all others."""
        return replace(sampling, **self.sampling)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.task is not None or self.files:
            yield from source_problems(self, at)
        else:
            yield from idle_tasks(None, at)
        yield from file_key_problems(self, at)
        if self.task is not None and self.count is None:
            yield f"{at.prompts}: must be a number where {at}task makes problems without end"
        for k in self.pass_at:
            if not 1 <= k <= self.samples_per_prompt:
                yield f"{at.pass_at}: {k} must be at least 1 and at most {at.samples_per_prompt}"
        if self.verifier is not None:
            yield from verifier_problems(self.verifier, at)


class EvaluationSettings(Settings):
    """Problems on which the policy is evaluated: the held-out share of `prompts`, or `sets`."""

    every: PositiveInt | None = None
    """Policy versions between evaluations of all sets that run beside training, on the generators that also sample for
    it; null: only where the script asks. An answer is of the version at the start of its evaluation or of a newer one.
    An evaluation that is due while the one before is still running is skipped: raise `every`, or ask fewer prompts."""
    prompts: PositiveInt = 256
    """Number of held-out prompts, each of which is asked once, if there are no `sets`."""
    samples_per_prompt: PositiveInt = 1
    """Answers sampled for each of them."""
    temperature: float | None = None
    """Their sampling temperature; 0 decodes greedily, null is `sampling.temperature`."""
    sets: dict[str, EvaluationSet] = field(default_factory=dict)
    """Named sets instead, such as `{aime: {files: [aime.jsonl], samples_per_prompt: 16, pass_at: [8]}, held_out:
    {prompts: 256}}`. `pass_at_1_before` and `pass_at_1_after` in `summary.json` are those of the first set. Each set
    has these keys:"""

    @property
    def named(self) -> dict[str, EvaluationSet]:
        """Every set by its name."""
        if self.sets:
            return self.sets
        sampling = {} if self.temperature is None else {"temperature": self.temperature}
        asked = EvaluationSet(prompts=self.prompts, samples_per_prompt=self.samples_per_prompt, sampling=sampling)
        return {HELD_OUT: asked}

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers that sets name."""
        return tuple(dict.fromkeys(self.verifiers_by_key("").values()))

    def verifiers_by_key(self, prefix: str = "evaluation.") -> dict[str, str]:
        """The verifiers that sets name, by their keys. `prefix` is this section's path with its dot."""
        named = {f"{prefix}{self.key(name)}verifier": one.verifier for name, one in self.named.items()}
        return {key: verifier for key, verifier in named.items() if verifier is not None}

    def key(self, name: str) -> str:
        """The path of a set's keys below this section's, with its dot."""
        return f"sets.{name}." if self.sets else ""

    def _problems(self, at: Section) -> Iterator[str]:
        for name in self.sets:
            if not re.fullmatch(r"[\w-]+", name):
                yield f"{at}sets: {name!r} must be a name of letters, digits, _ and -"
        if self.sets:
            yield from at.idle(f"{at}sets have their own", "prompts", "samples_per_prompt", "temperature")

    def problems_beside(
        self, at: Section, prompts: PromptSettings, sampling: SamplingSettings, max_context: int
    ) -> Iterator[str]:
        """One line for each setting that cannot work with a run's `prompts`, `sampling` and context length, except for
        files that do not exist (`absent_files`)."""
        if self.problems("") or any(one.problems("") for one in self.sets.values()):
            return  # the sections' own
        for name, one in self.named.items():
            key = f"{at}{self.key(name)}"
            yield from _sampling_problems(one, f"{key}sampling" if self.sets else key[:-1], sampling, max_context)
            if not prompts.problems("") and (problem := _source_problem(one, key, prompts)) is not None:
                yield problem


def _sampling_problems(one: EvaluationSet, key: str, sampling: SamplingSettings, max_context: int) -> list[str]:
    from goaly.base.config.check import check  # imports pydantic, which `--help` does not need

    _, problems = check(SamplingSettings, asdict(sampling) | one.sampling, key)
    found = [problem for problem in problems if re.split(r"[=:]", problem)[0].split(".")[-1] in one.sampling]
    longest = one.sampling.get("max_tokens")
    if not found and longest is not None and longest >= max_context:
        found.append(f"{key}.max_tokens={longest}: must leave room for a prompt in a context of {max_context} tokens")
    return found


def _source_problem(one: EvaluationSet, key: str, prompts: PromptSettings) -> str | None:
    from goaly.prompts.mixture import empty_split, unreadable

    of_training = (prompts.files, *(source.files for source in prompts.sources))
    trained = {Path(file).resolve() for files in of_training for file in files}
    if both := sorted(file for file in one.files if Path(file).resolve() in trained):
        return (
            f"{key}files: {', '.join(both)} must not be a file of `prompts`, on which the run trains; a set without "
            "`task` and `files` asks the held-out share of `prompts`"
        )
    source, split = one.source(prompts)
    if any(absent_files(source, Section(source, ""))):
        return None  # which the whole reports
    if (why := unreadable(source)) is not None:
        return f"{'prompts.' if source is prompts else key}files: {why}"
    if source is not prompts:
        why = empty_split(source, split)
        return why and f"{key}prompts={one.prompts}: there is no such problem: {why}"
    if one.count is None and any(each.task is not None for each in prompts.sources or (prompts,)):
        return f"{key}prompts=all: must be a number where a task of `prompts` makes problems without end"
    why = "it holds out none" if prompts.held_out_fraction == 0 else empty_split(source, split)
    return why and (
        f"prompts.held_out_fraction={prompts.held_out_fraction}: must be higher where an evaluation asks held-out "
        f"prompts, or give evaluation.sets problems of their own: {why}"
    )

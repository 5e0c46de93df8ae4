"""What a policy is measured on, and how: the same settings for a run and for `apps/eval`."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from goaly.configuration.schema import KnownWords
from goaly.generate.settings import SamplingSettings
from goaly.prompts.prompt import Split
from goaly.prompts.settings import ArithmeticSettings, PromptSettings, source_problems
from goaly.reward.settings import RewardSettings

HELD_OUT = "held_out"
"""The name of the one set of an evaluation that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet(KnownWords):
    """Problems to measure a policy on: of a task, of files, or the held-out share of `prompts`."""

    task: str | None = None
    """The built-in task that makes the problems; of those that a run trains on, only held-out ones are asked."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The addition task, where `task` is arithmetic."""
    files: tuple[str, ...] = ()
    """JSONL or Parquet files in the form of `prompts.files`; every problem in them may be asked. Without `task` and
    `files` the set is the held-out share of `prompts`."""
    prompts: int | Literal["all"] = "all"
    """How many problems are asked, each once: "all" that files have, or a number. A task needs a number."""
    samples_per_prompt: int = 1
    """Answers sampled to each problem. pass@k needs at least k of them."""
    pass_at: tuple[int, ...] = ()
    """Which pass@k are reported beside pass@1; empty: every power of two up to `samples_per_prompt`, and that itself.
    avg@n, the mean reward, is over all n samples."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What is sampled differently than `sampling` says, such as `{temperature: 0.6, top_p: 0.95, max_tokens: 512}`."""
    verifier: str | None = None
    """Function that scores the answers, as `package.module:function`; null: `reward.verifier`. It runs in
    `reward.workers` processes of its own, under the limits of `reward`."""

    @property
    def count(self) -> int | None:
        """How many problems are asked; None is all."""
        return None if self.prompts == "all" else self.prompts

    def source(self, prompts: PromptSettings) -> tuple[PromptSettings, Split]:
        """Where the problems come from, and which of its splits is asked, in a run that trains on `prompts`."""
        if self.files:
            return PromptSettings(task=None, files=self.files, held_out_fraction=0.0), Split.TRAIN
        if self.task is None:
            return prompts, Split.HELD_OUT
        fraction = prompts.held_out_fraction  # the split is the problem's own: what is held out is so for every task
        source = PromptSettings(task=self.task, arithmetic=self.arithmetic, held_out_fraction=fraction)
        return source, Split.HELD_OUT if fraction > 0 else Split.TRAIN

    def sampled(self, sampling: SamplingSettings) -> SamplingSettings:
        """How the answers are sampled, where `sampling` says so for all others."""
        return replace(sampling, **self.sampling)

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot."""
        found = []
        if self.task is not None or self.files:
            found += source_problems(self.task, self.files, self.arithmetic, prefix)
        elif self.arithmetic != ArithmeticSettings():
            found += self.arithmetic.idle(f"{prefix}arithmetic.", f"{prefix}task is null")
        if self.count is not None and self.count < 1:
            found.append(f'{prefix}prompts={self.prompts}: must be at least 1, or "all"')
        if self.task is not None and self.count is None:
            found.append(f"{prefix}prompts=all: must be a number where {prefix}task makes problems without end")
        if self.samples_per_prompt < 1:
            found.append(f"{prefix}samples_per_prompt={self.samples_per_prompt}: must be at least 1")
        for k in self.pass_at:
            if not 1 <= k <= self.samples_per_prompt:
                found.append(
                    f"{prefix}pass_at={list(self.pass_at)}: {k} must be at least 1 and at most "
                    f"{prefix}samples_per_prompt={self.samples_per_prompt}"
                )
        if self.verifier is not None:
            found += RewardSettings(verifier=self.verifier).problems(prefix)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How the policy is measured: on a held-out share of `prompts`, or on `sets`."""

    prompts: int = 256
    """How many held-out prompts are asked, each once, where there are no `sets`."""
    samples_per_prompt: int = 1
    """Answers sampled to each of them."""
    temperature: float | None = None
    """Their sampling temperature; 0 decodes greedily, null is `sampling.temperature`."""
    sets: dict[str, EvaluationSet] = field(default_factory=dict)
    """Named sets instead, such as `{aime: {files: [aime.jsonl], samples_per_prompt: 16, pass_at: [8]}, held_out:
    {prompts: 256}}`. The first one is that of `pass_at_1_before` and
    `pass_at_1_after` in `summary.json`. Each has these keys:"""

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
        """The verifiers that sets bring along."""
        return tuple(dict.fromkeys(one.verifier for one in self.named.values() if one.verifier is not None))

    def key(self, name: str) -> str:
        """The dotted path of a set's keys, with its dot, below this section's."""
        return f"sets.{name}." if self.sets else ""

    def problems(self, prefix: str) -> list[str]:
        """What can't work, a line each. `prefix` is the section's dotted path with its dot, such as `evaluation.`."""
        found = []
        for name in ("prompts", "samples_per_prompt"):
            if getattr(self, name) < 1:
                found.append(f"{prefix}{name}={getattr(self, name)}: must be at least 1")
        for name in self.sets:
            if not re.fullmatch(r"[\w-]+", name):
                found.append(f"{prefix}sets: {name!r} must be a name of letters, digits, _ and -")
        default = EvaluationSettings()
        for name in ("prompts", "samples_per_prompt", "temperature") if self.sets else ():
            if (value := getattr(self, name)) != getattr(default, name):
                found.append(f"{prefix}{name}={value}: has no effect, {prefix}sets have their own")
        return found

    def problems_beside(
        self, prefix: str, prompts: PromptSettings, sampling: SamplingSettings, max_context: int
    ) -> list[str]:
        """What can't work beside a run's `prompts` and `sampling`, in so many tokens of context, a line each."""
        if self.problems(prefix) or any(one.problems("") for one in self.sets.values()):
            return []  # the sections' own
        found = []
        for name, one in self.named.items():
            key = f"{prefix}{self.key(name)}"
            found += _sampling_problems(one, f"{key}sampling" if self.sets else key[:-1], sampling, max_context)
            found += [] if prompts.problems("") else _source_problems(one, key, prompts)
        return found


def _sampling_problems(one: EvaluationSet, key: str, sampling: SamplingSettings, max_context: int) -> list[str]:
    from goaly.configuration.build import Builder  # imports OmegaConf, which `--help` can do without
    from goaly.configuration.sources import Given

    known = {name: getattr(sampling, name) for name in vars(sampling)}
    builder = Builder(SamplingSettings, Given())
    builder.section(SamplingSettings, known | one.sampling, key)
    written = [problem for problem in builder.problems if re.split(r"[=:]", problem)[0].split(".")[-1] in one.sampling]
    found = [problem.removesuffix(" (default)") for problem in written]
    longest = one.sampling.get("max_tokens")
    if not found and longest is not None and longest >= max_context:
        found.append(f"{key}.max_tokens={longest}: must leave room for a prompt in a context of {max_context} tokens")
    return found


def _source_problems(one: EvaluationSet, key: str, prompts: PromptSettings) -> list[str]:
    from goaly.prompts.mixture import empty_split, unreadable

    of_training = (prompts.files, *(source.files for source in prompts.sources))
    trained = {Path(file).resolve() for files in of_training for file in files}
    if both := sorted(file for file in one.files if Path(file).resolve() in trained):
        return [
            f"{key}files: {', '.join(both)} must not be a file of `prompts`, which is trained on; a set without "
            "`task` and `files` asks its held-out share"
        ]
    source, split = one.source(prompts)
    if (why := unreadable(source)) is not None:
        return [f"{'prompts.' if source is prompts else key}files: {why}"]
    if source is not prompts:
        why = empty_split(source, split)
        return [] if why is None else [f"{key}prompts={one.prompts}: must be problems that are there: {why}"]
    if one.count is None and not _is_of_files(prompts):
        return [f"{key}prompts=all: must be a number where a task of `prompts` makes problems without end"]
    why = "it holds out none" if prompts.held_out_fraction == 0 else empty_split(source, split)
    if why is None:
        return []
    return [
        f"prompts.held_out_fraction={prompts.held_out_fraction}: must be higher where an evaluation asks held-out "
        f"prompts, or give evaluation.sets problems of their own: {why}"
    ]


def _is_of_files(prompts: PromptSettings) -> bool:
    return all(source.task is None for source in prompts.sources) if prompts.sources else prompts.task is None

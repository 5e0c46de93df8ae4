"""Evaluates a policy on a set of prompts: has them tried, and computes the scores.

pass@k is the probability that at least one of k samples is right. With c of n samples right, its unbiased estimate is
`1 - C(n - c, k) / C(n, k)`; the same n samples serve every k up to n. avg@n is the mean reward.

A prompt that leaves no room for an answer is not solved: its samples have the reward None, which counts as 0.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import fmean
from typing import Any

from goaly.base.errors import ConfigError
from goaly.prompts.mixture import distinct_prompts
from goaly.prompts.prompt import PASS_REWARD, Prompt, Split
from goaly.prompts.settings import PromptSettings
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings
from goaly.rollout.running_episodes import Failed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of answers, in tokens."""

    mean: float
    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Lengths":
        """The summary of these lengths."""
        ordered = sorted(lengths)
        return cls(
            mean=fmean(ordered),
            median=ordered[len(ordered) // 2],
            p95=ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
            longest=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """An evaluation's numbers."""

    prompts: int
    samples_per_prompt: int
    pass_at: Mapping[int, float]
    """pass@k for 1 and each requested k; without a request for 1, 2, 4, … and the number of samples."""
    average: float
    """avg@n: the mean reward of all samples."""
    lengths: Lengths | None = None
    too_long: int = 0
    """Prompts that left no room for an answer; they count as not solved."""
    failed: int = 0
    """Samples whose episode failed; their reward is 0."""

    @property
    def pass_at_1(self) -> float:
        """The share of right samples."""
        return self.pass_at[1]

    @property
    def scores(self) -> dict[str, float]:
        """All scores by name, such as `pass@1` and `avg@16`."""
        passes = {f"pass@{k}": value for k, value in self.pass_at.items()}
        return passes | {f"avg@{self.samples_per_prompt}": self.average}

    @classmethod
    def of(
        cls,
        rewards: Sequence[Sequence[float | None]],
        lengths: Sequence[int] = (),
        *,
        pass_at: Sequence[int] = (),
    ) -> "EvalResult":
        """The result of these rewards: a list for each prompt, all of the same length. None (no room for an answer)
        counts as 0. `pass_at` lists the k of pass@k; empty is the powers of two and the number of samples."""
        if not rewards or not rewards[0]:
            raise ValueError("an evaluation needs at least one prompt and one sample")
        samples = len(rewards[0])
        if any(len(group) != samples for group in rewards):
            raise ValueError(f"every prompt must have {samples} samples, as the first one has")
        counted = [[reward or 0.0 for reward in group] for group in rewards]
        right = [sum(reward >= PASS_REWARD for reward in group) for group in counted]
        ks = {1, *pass_at} if pass_at else {samples, *(1 << power for power in range(samples.bit_length()))}
        return cls(
            prompts=len(rewards),
            samples_per_prompt=samples,
            pass_at={k: fmean(pass_at_k(samples, count, k) for count in right) for k in sorted(ks)},
            average=fmean(reward for group in counted for reward in group),
            lengths=Lengths.of(lengths) if lengths else None,
            too_long=sum(None in group for group in rewards),
            failed=sum(isinstance(reward, Failed) for group in rewards for reward in group),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one policy version on several sets."""

    policy_version: int
    """The version at its start. Every answer is of this version or a newer one."""
    results: Mapping[str, EvalResult]
    newest_version: int | None = None
    """The newest version that may have answered: the trainer's, at its end. None if that was still `policy_version`."""

    @property
    def metrics(self) -> dict[str, float]:
        """All scores, as `evaluation/SET/pass@1`, and `evaluation/SET/too_long` and `failed` if they are not 0."""
        scores = {
            f"evaluation/{name}/{key}": float(value)
            for name, result in self.results.items()
            for key, value in (_lost(result) | result.scores).items()
        }
        return scores | {f"evaluation/{key}": float(value) for key, value in self._newest.items()}

    @property
    def summary(self) -> dict[str, Any]:
        """The version, and for each set the numbers of prompts, of those that are too long and of failed samples, if
        any, and all scores."""
        sets = {
            name: {"prompts": result.prompts, **_lost(result), **result.scores} for name, result in self.results.items()
        }
        return {"policy_version": self.policy_version, **self._newest, "sets": sets}

    @classmethod
    def recorded(cls, line: Mapping[str, Any], prompts: Mapping[str, int]) -> "Evaluation":
        """The evaluation whose version and metrics these are; `prompts` has the number of prompts of each set."""
        sets: dict[str, dict[str, float]] = {}
        for key, value in line.items():
            if key.count("/") == 2:
                _, name, score = key.split("/")
                sets.setdefault(name, {})[score] = value
        results = {}
        for name, scores in sets.items():
            (average,) = [score for score in scores if score.startswith("avg@")]
            results[name] = EvalResult(
                prompts=prompts.get(name, 0),
                samples_per_prompt=int(average.removeprefix("avg@")),
                pass_at={int(key.removeprefix("pass@")): scores[key] for key in scores if key.startswith("pass@")},
                average=scores[average],
                too_long=int(scores.get("too_long", 0)),
                failed=int(scores.get("failed", 0)),
            )
        newest = line.get("evaluation/newest_version")
        return cls(
            policy_version=line["policy_version"],
            results=results,
            newest_version=None if newest is None else int(newest),
        )

    @property
    def _newest(self) -> dict[str, int]:
        return {} if self.newest_version is None else {"newest_version": self.newest_version}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """A named set and its problems."""

    name: str
    settings: EvaluationSet
    prompts: tuple[Prompt, ...]


class ProblemSets:
    """The evaluation sets of a run, read once: every evaluation asks the same problems."""

    def __init__(self, settings: EvaluationSettings, prompts: PromptSettings):
        """`prompts` are the settings of the training data. Logs a warning if a set has fewer problems than
        requested."""
        self._sets = {
            name: ProblemSet(
                name=name, settings=one, prompts=_prompts(one, f"evaluation.{settings.key(name)}", prompts)
            )
            for name, one in settings.named.items()
        }

    def chosen(self, names: Iterable[str] | None = None) -> list[ProblemSet]:
        """The sets of these names, or all of them, in their order in the settings."""
        wanted = list(self._sets if names is None else names)
        if unknown := [name for name in wanted if name not in self._sets]:
            known = ", ".join(self._sets)
            raise ValueError(f"no evaluation set is named {', '.join(unknown)}; known are {known}")
        return [one for name, one in self._sets.items() if name in wanted]


def _prompts(one: EvaluationSet, key: str, prompts: PromptSettings) -> tuple[Prompt, ...]:
    source, split = one.source(prompts)
    found = distinct_prompts(source, split, one.count)
    kind = "held-out problems" if split is Split.HELD_OUT else "problems"
    if not found:
        raise ConfigError([f"{key}prompts={one.prompts}: there are no {kind}"])
    if one.count is not None and len(found) < one.count:
        logger.warning(
            "%sprompts=%d: there are only %d different %s; each is asked once", key, one.count, len(found), kind
        )
    return tuple(replace(prompt, verifier=one.verifier) for prompt in found) if one.verifier else found


def warn_of_long_prompts(name: str, result: EvalResult) -> None:
    """Log a warning if prompts of this set are too long for the context."""
    if result.too_long:
        long = f"{result.too_long} of {result.prompts} prompts"
        why = "leave no room for an answer in the context and count as not solved"
        logger.warning("evaluation set %s: %s %s", name, long, why)


def warn_of_failures(name: str, rewards: Sequence[Sequence[float | None]]) -> None:
    """Log a warning with the reason of the last sample of this set whose episode failed."""
    if failed := [reward for group in rewards for reward in group if isinstance(reward, Failed)]:
        samples = sum(map(len, rewards))
        why = f"count reward 0, because their episodes failed; the last: {failed[-1].why}"
        logger.warning("evaluation set %s: %d of %d samples %s", name, len(failed), samples, why)


def _lost(result: EvalResult) -> dict[str, int]:
    counts = {"too_long": result.too_long, "failed": result.failed}
    return {name: count for name, count in counts.items() if count}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` samples, `right` of them right."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be at least 1 and at most the number of samples, {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)

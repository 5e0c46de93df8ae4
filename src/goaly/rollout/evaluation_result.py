"""Evaluates a policy on a set of prompts: has them tried, and computes the scores.

pass@k is the probability that at least one of k samples is right. With c of n samples right, its unbiased estimate is
`1 - C(n - c, k) / C(n, k)`; the same n samples serve every k up to n. avg@n is the mean reward.

A prompt that leaves no room for an answer is not solved: its samples have the reward None, which counts as 0.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any

from goaly.generate.request import PromptTooLong, Sample, Sampling, evaluation_seeds, seed_of
from goaly.prompts.prompt import PASS_REWARD, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.running import Failed

logger = logging.getLogger(__name__)


SampleFunction = Callable[[list[int], Sampling], Awaitable[Sample]]
Verifier = Callable[[Prompt, str], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The result of an attempt at a problem."""

    reward: float
    tokens: int | None
    """How many tokens the policy wrote for it; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt at a problem."""

    prompt: Prompt
    index: int
    """Counts the attempts at this problem, from 0."""
    sampling: Sampling
    seeds: str
    """The first part of the names of its seeds."""


Solve = Callable[[Attempt], Awaitable[Solution | None]]
"""Tries a problem; None if the prompt leaves no room for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The lengths and rewards of a prompt's answers."""

    prompt: Prompt
    lengths: tuple[int, ...]
    """Empty if the prompt left no room for an answer."""
    rewards: tuple[float | None, ...]
    """None if the prompt left no room for an answer."""


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
        return cls(
            prompts=len(rewards),
            samples_per_prompt=samples,
            pass_at={k: fmean(pass_at_k(samples, count, k) for count in right) for k in _ks(samples, pass_at)},
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


def by_tokens(sample: SampleFunction, tokenizer: ChatTokenizer, verify: Verifier) -> Solve:
    """Attempts of one answer each, by a function that samples tokens."""

    async def solve(attempt: Attempt) -> Solution | None:
        prompt = attempt.prompt
        tokens = tokenizer.render(prompt.messages, tools=prompt.tools)
        try:
            answer = await sample(tokens, Sampling(seed=seed_of(f"{attempt.seeds}.0")).changed(attempt.sampling))
        except PromptTooLong:
            return None
        written = answer.tokens.tolist()
        return Solution(reward=await verify(prompt, tokenizer.decode(written)), tokens=len(written))

    return solve


async def attempted(
    solve: Solve, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling, seed: int = 0
) -> list[Answered]:
    """Try every problem `samples_per_prompt` times, all at once.

    Each attempt has seeds of its own, made of `seed`, unless `sampling` has one.
    """

    async def one(prompt: Prompt, index: int) -> Solution | None:
        seeds = f"{evaluation_seeds(seed, 0, prompt.id)}.{index}"
        return await solve(Attempt(prompt=prompt, index=index, sampling=sampling, seeds=seeds))

    async with asyncio.TaskGroup() as tasks:
        asked = [[tasks.create_task(one(prompt, index)) for index in range(samples_per_prompt)] for prompt in prompts]
    found = [[task.result() for task in group] for group in asked]
    return [
        Answered(
            prompt=prompt,
            lengths=tuple(one.tokens for one in solutions if one is not None and one.tokens is not None),
            rewards=tuple(None if one is None else one.reward for one in solutions),
        )
        for prompt, solutions in zip(prompts, found, strict=True)
    ]


def summary(answered: Sequence[Answered], pass_at: Sequence[int] = ()) -> EvalResult:
    """The result of these answers, with pass@k for these k."""
    lengths = [length for entry in answered for length in entry.lengths]
    return EvalResult.of([entry.rewards for entry in answered], lengths, pass_at=pass_at)


def summaries_by(answered: Sequence[Answered], column: str, pass_at: Sequence[int] = ()) -> dict[str, EvalResult]:
    """The results by a metadata column of the prompts, numbers in ascending order."""
    groups: dict[str, list[Answered]] = {}
    for entry in answered:
        groups.setdefault(entry.prompt.metadata.get(column, ""), []).append(entry)
    return {key: summary(groups[key], pass_at) for key in sorted(groups, key=lambda key: (key.rjust(20), key))}


def _ks(samples: int, asked: Sequence[int]) -> list[int]:
    return sorted({1, *asked} if asked else {samples, *(1 << power for power in range(samples.bit_length()))})

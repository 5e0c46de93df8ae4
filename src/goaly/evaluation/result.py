"""What a policy is worth on a set of prompts: asks for samples, verifies them, and counts.

pass@k is the probability that at least one of k samples is right. From n samples of which c are right it is estimated
without bias as `1 - C(n - c, k) / C(n, k)`; the same n samples serve every k up to n. avg@n is the mean reward.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any, Protocol

from goaly.prompts.prompt import PASS_REWARD, Prompt
from goaly.prompts.tokenizer import ChatTokenizer


class Answer(Protocol):
    """What sampling gives: the tokens that the policy wrote."""

    @property
    def tokens(self) -> Any:
        """One dimension, the stop token included."""
        ...


SampleFunction = Callable[[list[int], Any], Awaitable[Answer]]
Verifier = Callable[[Prompt, str], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt's answers: how long they were, and what they earned."""

    prompt: Prompt
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long the answers were, in tokens."""

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
    """pass@k for 1 and each k that is asked for, else for 1, 2, 4, … and the number of samples."""
    average: float
    """avg@n: the mean reward of all samples."""
    lengths: Lengths | None = None

    @property
    def pass_at_1(self) -> float:
        """The share of samples that are right."""
        return self.pass_at[1]

    @property
    def scores(self) -> dict[str, float]:
        """Every score by its usual name."""
        passes = {f"pass@{k}": value for k, value in self.pass_at.items()}
        return passes | {f"avg@{self.samples_per_prompt}": self.average}

    @classmethod
    def of(
        cls,
        rewards: Sequence[Sequence[float]],
        lengths: Iterable[int] | None = None,
        *,
        pass_at: Sequence[int] = (),
    ) -> "EvalResult":
        """The result of these rewards: one list a prompt, all of the same length. `pass_at` says which k of pass@k
        are of interest; empty is the powers of two and the number of samples."""
        if not rewards or not rewards[0]:
            raise ValueError("an evaluation needs at least one prompt and one sample")
        samples = len(rewards[0])
        if any(len(group) != samples for group in rewards):
            raise ValueError(f"every prompt must have {samples} samples, as the first one has")
        right = [sum(reward >= PASS_REWARD for reward in group) for group in rewards]
        return cls(
            prompts=len(rewards),
            samples_per_prompt=samples,
            pass_at={k: fmean(pass_at_k(samples, count, k) for count in right) for k in _ks(samples, pass_at)},
            average=fmean(reward for group in rewards for reward in group),
            lengths=None if lengths is None else Lengths.of(lengths),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one policy version is worth on the sets that it was asked."""

    policy_version: int
    results: Mapping[str, EvalResult]

    @property
    def pass_at_1(self) -> float:
        """pass@1 on the first set."""
        return next(iter(self.results.values())).pass_at_1

    @property
    def metrics(self) -> dict[str, float]:
        """Every score, as `evaluation/SET/pass@1`."""
        return {
            f"evaluation/{name}/{score}": value
            for name, result in self.results.items()
            for score, value in result.scores.items()
        }

    @property
    def summary(self) -> dict[str, Any]:
        """The version, and by set how many prompts were asked and every score."""
        sets = {name: {"prompts": result.prompts, **result.scores} for name, result in self.results.items()}
        return {"policy_version": self.policy_version, "sets": sets}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` samples of which `right` are right."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be at least 1 and at most the number of samples, {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)


async def ask(
    sample: SampleFunction,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    verify: Verifier,
    samples_per_prompt: int,
    sampling: Any,
) -> list[Answered]:
    """Sample every prompt `samples_per_prompt` times, all at once, and judge each answer when it comes."""

    async def one(prompt: Prompt, tokens: list[int]) -> tuple[int, float]:
        written = [int(token) for token in (await sample(tokens, sampling)).tokens]
        return len(written), await verify(prompt, tokenizer.decode(written))

    rendered = [tokenizer.render(prompt.messages, tools=prompt.tools) for prompt in prompts]
    async with asyncio.TaskGroup() as tasks:
        asked = [
            [tasks.create_task(one(prompt, tokens)) for _ in range(samples_per_prompt)]
            for prompt, tokens in zip(prompts, rendered, strict=True)
        ]
    return [
        Answered(
            prompt=prompt,
            lengths=tuple(task.result()[0] for task in group),
            rewards=tuple(task.result()[1] for task in group),
        )
        for prompt, group in zip(prompts, asked, strict=True)
    ]


def summary(answered: Sequence[Answered], pass_at: Sequence[int] = ()) -> EvalResult:
    """The result of answered prompts, with pass@k for these k."""
    lengths = (length for entry in answered for length in entry.lengths)
    return EvalResult.of([entry.rewards for entry in answered], lengths, pass_at=pass_at)


def summaries_by(answered: Sequence[Answered], column: str, pass_at: Sequence[int] = ()) -> dict[str, EvalResult]:
    """The results by a metadata column of the prompts, numbers in their order."""
    groups: dict[str, list[Answered]] = {}
    for entry in answered:
        groups.setdefault(entry.prompt.metadata.get(column, ""), []).append(entry)
    return {key: summary(groups[key], pass_at) for key in sorted(groups, key=lambda key: (key.rjust(20), key))}


def _ks(samples: int, asked: Sequence[int]) -> list[int]:
    return (
        sorted({1, *asked})
        if asked
        else sorted({samples, *(1 << power for power in range(samples.bit_length()) if 1 << power <= samples)})
    )

"""What a policy is worth on held-out prompts: asks for samples, verifies them, and counts.

pass@k is the probability that at least one of k samples is right. From n samples of which c are right it is estimated
without bias as `1 - C(n - c, k) / C(n, k)`; the same n samples serve every k up to n. avg@n is the mean reward.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any, Protocol

from goaly.prompts.prompt import Prompt
from goaly.prompts.tokenizer import ChatTokenizer

PASSING_REWARD = 1.0
"""A sample with at least this reward is right."""


class Answer(Protocol):
    """What sampling gives: the tokens that the policy wrote."""

    @property
    def tokens(self) -> Any:
        """One dimension, the stop token included."""
        ...


SampleFunction = Callable[[list[int], Any], Awaitable[Answer]]
Verifier = Callable[[Prompt, str], float]


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
    """pass@k for 1, 2, 4, … and the number of samples."""
    average: float
    """avg@n: the mean reward of all samples."""
    lengths: Lengths | None = None

    @property
    def pass_at_1(self) -> float:
        """The share of samples that are right."""
        return self.pass_at[1]

    @classmethod
    def of(cls, rewards: Sequence[Sequence[float]], lengths: Iterable[int] | None = None) -> "EvalResult":
        """The result of these rewards: one list a prompt, all of the same length."""
        if not rewards or not rewards[0]:
            raise ValueError("an evaluation needs at least one prompt and one sample")
        samples = len(rewards[0])
        if any(len(group) != samples for group in rewards):
            raise ValueError(f"every prompt must have {samples} samples, as the first one has")
        right = [sum(reward >= PASSING_REWARD for reward in group) for group in rewards]
        return cls(
            prompts=len(rewards),
            samples_per_prompt=samples,
            pass_at={k: fmean(pass_at_k(samples, count, k) for count in right) for k in _ks(samples)},
            average=fmean(reward for group in rewards for reward in group),
            lengths=None if lengths is None else Lengths.of(lengths),
        )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` samples of which `right` are right."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be at least 1 and at most the number of samples, {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)


async def answers(
    sample: SampleFunction, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Any
) -> list[list[list[int]]]:
    """The tokens of every answer: a list of samples for each prompt. All are asked for at once."""

    async def one(tokens: list[int]) -> list[int]:
        return [int(token) for token in (await sample(tokens, sampling)).tokens]

    async with asyncio.TaskGroup() as tasks:
        asked = [
            [tasks.create_task(one(tokens)) for _ in range(samples_per_prompt)]
            for tokens in (tokenizer.render(prompt.messages) for prompt in prompts)
        ]
    return [[task.result() for task in group] for group in asked]


async def evaluate(
    sample: SampleFunction,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    verify: Verifier,
    samples_per_prompt: int,
    sampling: Any,
) -> EvalResult:
    """Sample every prompt `samples_per_prompt` times through `sample(tokens, sampling)`, and verify the texts."""
    written = await answers(sample, tokenizer, prompts, samples_per_prompt, sampling)
    return graded(tokenizer, prompts, written, verify)


def graded(
    tokenizer: ChatTokenizer, prompts: Sequence[Prompt], written: Sequence[Sequence[Sequence[int]]], verify: Verifier
) -> EvalResult:
    """The result of answers that have been written."""
    rewards = [
        [verify(prompt, tokenizer.decode(tokens)) for tokens in group]
        for prompt, group in zip(prompts, written, strict=True)
    ]
    return EvalResult.of(rewards, lengths=(len(tokens) for group in written for tokens in group))


def _ks(samples: int) -> list[int]:
    return sorted({samples, *(1 << power for power in range(samples.bit_length()) if 1 << power <= samples)})

"""Attempts at the problems of an evaluation: by an answer, by an episode, or by an API elsewhere."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from goaly.agents.chat_elsewhere import tells_of_full_context
from goaly.agents.forwarder import parameters
from goaly.base.errors import RunFailed, cause_of, first_error
from goaly.environments.protocol import ActionRefused, EnvironmentFailed
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.generate.request import PromptTooLong, Sample, Sampling, evaluation_seeds, seed_of
from goaly.prompts.prompt import Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.episode import EpisodeContext, EpisodeFunction, trajectories_of
from goaly.rollout.evaluation import EvalResult
from goaly.rollout.running_episodes import Failed, within
from goaly.trajectory import episode_reward

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 16
"""Failed attempts in a row that end an evaluation."""


SampleFunction = Callable[[list[int], Sampling], Awaitable[Sample]]
Verifier = Callable[[Prompt, str], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The result of an attempt at a problem."""

    reward: float
    tokens: int | None
    """How many tokens the policy wrote for it; None if that is not known."""
    notes: Sequence[Mapping[str, Any]] = ()
    """Notes of its script."""


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
    notes: tuple[Sequence[Mapping[str, Any]], ...] = ()
    """Notes of the script of each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An episode's attempt that may begin."""

    context: EpisodeContext
    tokens: Callable[[], int | None]
    """How many tokens the policy has written for it; None if that is not known."""


Serve = Callable[[Attempt], AbstractContextManager[Begun]]
"""Serves the policy to one attempt, with its parameters where the episode or its agent names none."""


def by_episode(episode: EpisodeFunction, serve: Serve, *, most: int, seconds: float | None, retries: int = 0) -> Solve:
    """Attempts of a script's episode, at most `most` at once. One that raises, or takes longer than `seconds`, fails;
    if its environment failed, it begins again up to `retries` times. An error of its verifier ends the evaluation."""
    places = asyncio.Semaphore(most)
    failures = 0

    async def solve(attempt: Attempt) -> Solution | None:
        async with places:  # unblocked by the end of other attempts
            for _ in range(retries):
                try:
                    return await once(attempt, is_last=False)
                except EnvironmentFailed as error:
                    logger.warning("an attempt at prompt %s begins again: %s", attempt.prompt.id, cause_of(error))
            return await once(attempt, is_last=True)

    async def once(attempt: Attempt, *, is_last: bool) -> Solution | None:
        nonlocal failures
        prompt = attempt.prompt
        with serve(attempt) as begun:
            unjudged: list[Exception] = []

            async def judge(prompt: Prompt, response: str) -> float:
                try:
                    return await begun.context.reward(prompt, response)
                except Exception as error:
                    unjudged.append(error)
                    raise

            context = replace(begun.context, reward=judge)
            try:
                made = await within(seconds, episode(prompt, context), f"an attempt at prompt {prompt.id}")
                reward = episode_reward(trajectories_of(made))
                failures = 0
            except Exception as error:
                cause = first_error(error)
                if isinstance(cause, PromptFillsContext):
                    return None
                if unjudged:
                    raise unjudged[0] from None
                if not is_last and isinstance(cause, EnvironmentFailed) and not isinstance(cause, ActionRefused):
                    raise cause from None
                why = cause_of(cause)
                reward = 0.0 if isinstance(cause, ContextFull) else Failed(why)
                failures += not isinstance(cause, ContextFull)
                logger.warning("an evaluation counts reward 0: prompt %s: %s", prompt.id, why)
                if failures >= FAILURES_IN_A_ROW:
                    raise RunFailed(f"{failures} attempts failed in a row; the last: {why}") from error
            return Solution(reward=reward, tokens=begun.tokens(), notes=tuple(begun.context.chat.notes))

    return solve


def by_chat(client: "openai.AsyncOpenAI", model: str, verify: Verifier, *, most: int) -> Solve:
    """Attempts of one answer each, by OpenAI's API of chats, at most `most` at once."""
    import openai

    places = asyncio.Semaphore(most)

    async def solve(attempt: Attempt) -> Solution | None:
        prompt = attempt.prompt
        asked: dict[str, Any] = {"messages": [message.as_dict() for message in prompt.messages]}
        if prompt.tools:
            asked["tools"] = prompt.tools
        more = parameters(attempt.sampling, seed_of(f"{attempt.seeds}.0"))
        async with places:  # unblocked by the end of other attempts
            try:
                made = await client.chat.completions.create(model=model, **asked, extra_body=more)
            except openai.BadRequestError as error:
                if tells_of_full_context(error):
                    return None
                raise RunFailed(f"the endpoint refuses prompt {prompt.id}: {error}") from error
            except openai.OpenAIError as error:
                raise RunFailed(f"the endpoint does not answer prompt {prompt.id}: {error}") from error
        reward = await verify(prompt, made.choices[0].message.content or "")
        return Solution(reward=reward, tokens=made.usage.completion_tokens if made.usage else None)

    return solve


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
            notes=tuple(() if one is None else one.notes for one in solutions),
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

"""Attempts at problems by episodes, or by an API elsewhere. `result.py` counts them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from goaly.agents.forwarder import parameters
from goaly.base.errors import RunFailed, cause_of, first_error
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.generate.request import seed_of
from goaly.prompts.prompt import Prompt
from goaly.rollout.episode import EpisodeContext, EpisodeFunction, trajectories_of
from goaly.rollout.evaluation_result import Attempt, Solution, Solve, Verifier
from goaly.rollout.running import Failed, within
from goaly.trajectory import episode_reward

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 16
"""Failed attempts in a row that end an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An episode's attempt that may begin."""

    context: EpisodeContext
    tokens: Callable[[], int | None]
    """How many tokens the policy has written for it; None if that is not known."""


Serve = Callable[[Attempt], AbstractContextManager[Begun]]
"""Serves the policy to one attempt, with its parameters where the episode or its agent names none."""


def by_episode(episode: EpisodeFunction, serve: Serve, *, most: int, seconds: float | None) -> Solve:
    """Attempts of a script's episode, at most so many at once. One that raises, or takes longer than this, has failed;
    the evaluation ends if its verifier does."""
    places = asyncio.Semaphore(most)
    failures = 0

    async def solve(attempt: Attempt) -> Solution | None:
        nonlocal failures
        prompt = attempt.prompt
        async with places:  # unblocked by the end of other attempts
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
                    why = cause_of(cause)
                    reward = 0.0 if isinstance(cause, ContextFull) else Failed(why)
                    failures += not isinstance(cause, ContextFull)
                    logger.warning("an evaluation counts reward 0: prompt %s: %s", prompt.id, why)
                    if failures >= FAILURES_IN_A_ROW:
                        raise RunFailed(f"{failures} attempts failed in a row; the last: {why}") from error
                return Solution(reward=reward, tokens=begun.tokens())

    return solve


def by_chat(client: "openai.AsyncOpenAI", model: str, verify: Verifier, *, most: int) -> Solve:
    """Attempts of one answer each, by OpenAI's API of chats, at most so many at once."""
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
                if "context" in str(error) and "length" in str(error):
                    return None
                raise RunFailed(f"the endpoint refuses prompt {prompt.id}: {error}") from error
            except openai.OpenAIError as error:
                raise RunFailed(f"the endpoint does not answer prompt {prompt.id}: {error}") from error
        reward = await verify(prompt, made.choices[0].message.content or "")
        return Solution(reward=reward, tokens=made.usage.completion_tokens if made.usage else None)

    return solve

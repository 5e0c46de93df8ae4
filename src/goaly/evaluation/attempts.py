"""Attempts at problems by an agent, or by an API elsewhere. `result.py` verifies and counts them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goaly.agents.forwarder import parameters
from goaly.errors import EpisodeError, RunFailed, cause_of, first_error
from goaly.evaluation.result import Solution, Solve
from goaly.generate.request import Sampling, seed_of
from goaly.prompts.prompt import Prompt
from goaly.rollout.running import within

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

Agent = Callable[..., Awaitable[str]]
"""`agent(messages, *, base_url, api_key)`: the final answer to these messages, with the help of the API at the URL."""
FAILURES_IN_A_ROW = 16
"""An evaluation ends after so many failed attempts without another one between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsPolicy:
    """Where the agent of one attempt reaches the policy."""

    base_url: str
    api_key: str
    tokens: Callable[[], int | None]
    """How many tokens the policy has written for it; None if that is not known."""


Serve = Callable[[Prompt, Sampling, str], AbstractContextManager[AgentsPolicy]]
"""Serves the policy to one attempt, with these parameters where its agent names none, and with seeds of these names."""


def by_agent(agent: Agent, serve: Serve, *, most: int, seconds: float | None) -> Solve:
    """Attempts of an agent, at most so many at once. One that raises, or takes longer than this, has failed."""
    places = asyncio.Semaphore(most)
    failures = 0

    async def solve(prompt: Prompt, sampling: Sampling, seeds: str) -> Solution:
        nonlocal failures
        messages = [message.as_dict() for message in prompt.messages]
        async with places:  # unblocked by the end of other attempts
            with serve(prompt, sampling, seeds) as policy:
                try:
                    attempt = agent(messages, base_url=policy.base_url, api_key=policy.api_key)
                    text = await within(seconds, _awaited(attempt), f"the agent with prompt {prompt.id}")
                    failures = 0
                except Exception as error:
                    text, why = None, cause_of(first_error(error))
                    failures += 1
                    logger.warning("an evaluation counts reward 0: prompt %s: %s", prompt.id, why)
                    if failures >= FAILURES_IN_A_ROW:
                        raise RunFailed(f"{failures} attempts of the agent failed in a row; the last: {why}") from error
                return Solution(text=text, tokens=policy.tokens())

    return solve


async def _awaited(attempt: Awaitable[str]) -> str:
    text = await attempt
    if not isinstance(text, str):
        raise EpisodeError(f"the agent returned {type(text).__name__}, must be its answer as a text")
    return text


def by_chat(client: "openai.AsyncOpenAI", model: str, *, most: int) -> Solve:
    """Attempts of one answer each, by OpenAI's API of chats, at most so many at once."""
    import openai

    places = asyncio.Semaphore(most)

    async def solve(prompt: Prompt, sampling: Sampling, seeds: str) -> Solution | None:
        asked: dict[str, Any] = {"messages": [message.as_dict() for message in prompt.messages]}
        if prompt.tools:
            asked["tools"] = prompt.tools
        more = parameters(sampling, seed_of(f"{seeds}.0"))
        async with places:  # unblocked by the end of other attempts
            try:
                made = await client.chat.completions.create(model=model, **asked, extra_body=more)
            except openai.BadRequestError as error:
                if "context" in str(error) and "length" in str(error):
                    return None
                raise RunFailed(f"the endpoint refuses prompt {prompt.id}: {error}") from error
            except openai.OpenAIError as error:
                raise RunFailed(f"the endpoint does not answer prompt {prompt.id}: {error}") from error
        return Solution(
            text=made.choices[0].message.content or "", tokens=made.usage.completion_tokens if made.usage else None
        )

    return solve

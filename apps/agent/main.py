"""GRPO of an agent that knows nothing of goaly: it asks the policy by OpenAI's API. START HERE.

    python -m apps.agent.main --config configs/agent/calculator.yaml

An episode runs the agent that the config names, and scores its final answer. Everything that the policy wrote for the
agent is trained. The two loops are those of `apps/grpo/main.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from apps.grpo.main import grpo
from goaly.agents.episode_folder import EPISODE_FOLDER, episode_folder
from goaly.agents.program import answer_of_program
from goaly.agents.settings import AgentSettings
from goaly.base.config import Loaded, run_cli
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig

logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.agents.gateway import Endpoint
    from goaly.prompts.prompt import Prompt
    from goaly.rollout.episode import EpisodeContext, EpisodeFunction
    from goaly.trajectory import Trajectory

    Agent = Callable[[Prompt, Endpoint], Awaitable[str]]


async def episode(agent: Agent, prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Let the agent answer, and score its answer, unless the agent has sent a reward itself."""
    answer = await agent(prompt, context.endpoint)
    if not isinstance(answer, str):
        raise TypeError(f"the agent returned {type(answer).__name__}, must be its answer as a text")
    if context.chat.has_reward:
        return context.chat.finish()
    score = await context.reward(prompt, answer)
    return context.chat.finish(score)


async def program_episode(settings: AgentSettings, prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """The same with the agent's program, in a folder of its own that the verifier sees, too."""
    async with episode_folder(context.endpoint.api_key, settings.keep_folders) as folder:
        program = partial(answer_of_program, settings.command, folder, hidden=(*settings.hidden, EPISODE_FOLDER))
        return await episode(program, folder.shown_to_verifier(prompt), context)


async def by_function(function: Callable[..., Awaitable[str]], prompt: Prompt, endpoint: Endpoint) -> str:
    """The answer of an agent that is a coroutine function."""
    question = [message.as_dict() for message in prompt.messages]
    return await function(question, base_url=endpoint.base_url, api_key=endpoint.api_key)


def episode_of(settings: AgentSettings) -> EpisodeFunction:
    """The episode that these settings name, or the one of the agent that they name."""
    if settings.is_episode:
        return settings.called
    if settings.command:
        return partial(program_episode, settings)
    return partial(episode, partial(by_function, settings.called))


def main(loaded: Loaded[RunConfig]) -> int:
    """Train the agent of this config."""
    from goaly.run.launch import launch

    settings = loaded.config.agent
    if settings is None:
        named = "agent.function or agent.command names it"
        raise ConfigError([f"agent=null: must be a section, because this script runs an agent; {named}"])
    if (warning := settings.warning(loaded.config.chat)) is not None:
        logger.warning(warning)
    return launch(loaded, episode_of(settings), grpo, agent=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.agent.main", description="GRPO of an agent.")

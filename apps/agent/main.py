"""GRPO of an agent that knows nothing of goaly: it asks the policy by OpenAI's API. START HERE.

    python -m apps.agent.main --config configs/agent/calculator.yaml

An episode runs the agent that the config names, and scores its final answer. Everything that the policy wrote for the
agent is trained. The two loops are those of `apps/grpo/main.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from apps.grpo.main import grpo
from goaly.agents.settings import AgentSettings
from goaly.config import Loaded, run_cli
from goaly.errors import ConfigError
from goaly.run.config import RunConfig

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.prompts.prompt import Prompt
    from goaly.rollout.episode import EpisodeContext, EpisodeFunction
    from goaly.trajectory import Trajectory


async def episode(agent: Callable[..., Awaitable[str]], prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Let the agent answer, and score its answer, unless the agent has sent a reward itself."""
    question = [message.as_dict() for message in prompt.messages]
    answer = await agent(question, base_url=context.endpoint.base_url, api_key=context.endpoint.api_key)
    if not isinstance(answer, str):
        raise TypeError(f"the agent returned {type(answer).__name__}, must be its answer as a text")
    if context.chat.has_reward:
        return context.chat.finish()
    score = await context.reward(prompt, answer)
    return context.chat.finish(score)


def episode_of(settings: AgentSettings) -> EpisodeFunction:
    """The episode that these settings name, or the one of the agent that they name."""
    return settings.called if settings.is_episode else partial(episode, settings.called)


def main(loaded: Loaded[RunConfig]) -> int:
    """Train the agent of this config."""
    from goaly.run.launch import launch

    settings = loaded.config.agent
    if settings is None:
        raise ConfigError(["agent=null: must be a section, because this script runs an agent; agent.function names it"])
    return launch(loaded, episode_of(settings), grpo, agent=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.agent.main", description="GRPO of an agent.")

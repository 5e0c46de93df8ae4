"""A guessing game of several turns, in an OpenEnv environment. `make guessing` runs it.

    python -m apps.agent.guessing --config configs/agent/guessing.yaml

The policy guesses a number, and the environment answers whether the number is greater or smaller. Each guess gets the
share of the numbers that it rules out as a process reward, and the game gets reward 1 if the number was found. With
`critic` in its config the run is PPO, whose critic says what a turn is worth (GAE); without, it is GRPO with the
advantages `process`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from apps.agent.tasks import GUESSES, LARGEST
from apps.grpo.main import grpo
from apps.ppo.main import ppo
from goaly.base.config import Loaded, run_cli
from goaly.plan.run_config import RunConfig

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.environments.limits import LimitedEnvironment
    from goaly.environments.pool import EnvironmentPool
    from goaly.prompts.prompt import Prompt
    from goaly.rollout.episode import EpisodeContext
    from goaly.trajectory import Trajectory

PYTHON = ".venv-openenv/bin/python"
"""OpenEnv has an environment of its own: its dependencies are not ours."""
MOST_GAMES = 64
PROCESS_REWARD = 0.25
"""Of a guess that leaves nothing to guess: a game that was lost stays below 1, which counts as passed."""


async def episode(prompt: Prompt, context: EpisodeContext) -> list[Trajectory]:
    """Play the game about the number that the prompt's answer is."""
    from goaly.prompts.prompt import Message

    assert prompt.answer is not None, "the number of the game"
    said, found = list(prompt.messages), 0.0
    async with games().lease(prompt.source) as game:
        await game.reset({"number": int(prompt.answer), "largest": LARGEST})
        for _ in range(GUESSES):
            guess = await context.chat.say(said)
            if not (guess.content or "").isdecimal():
                break
            result = await game.step({"number": int(guess.content or "")})
            context.chat.credited(guess, PROCESS_REWARD * (result.reward or 0.0))
            if result.done:
                found = 1.0
                break
            said += [guess, Message(role="user", content=result.observation["text"])]
    return context.chat.finish(found)


@cache
def games() -> EnvironmentPool[LimitedEnvironment]:
    """The games of this process. Their server ends with it."""
    from goaly.environments.limits import LimitedEnvironment
    from goaly.environments.openenv import OpenEnvironment
    from goaly.environments.pool import EnvironmentPool
    from goaly.environments.server_process import Command, Server

    arguments = [PYTHON, str(Path(__file__).with_name("game_server.py")), "{fd}", str(MOST_GAMES)]
    server = Server(Command(arguments=arguments, log=Path("/dev/null")))

    async def start() -> LimitedEnvironment:
        return LimitedEnvironment(OpenEnvironment(server))

    return EnvironmentPool(start, size=MOST_GAMES)


def main(loaded: Loaded[RunConfig]) -> int:
    """Train the policy that this config describes to play."""
    from goaly.run.launch import launch

    if loaded.config.critic is None:
        return launch(loaded, episode, grpo)
    return launch(loaded, episode, ppo, critic=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.agent.guessing", description="RL of a guessing game.")

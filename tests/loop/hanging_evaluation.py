"""GRPO, or PPO if there is a critic, whose final evaluation never ends; the script saves nothing by itself."""

import asyncio
import sys

from apps.grpo.main import collect, episode
from apps.grpo.main import train as train_policy
from apps.ppo.main import train as train_policy_and_critic
from goaly.base.config import Loaded, run_cli
from goaly.plan.run_config import RunConfig
from goaly.run.launch import launch
from goaly.run.run import Run


async def script(run: Run) -> None:
    """Learn, and hang."""
    train = train_policy if run.critic is None else train_policy_and_critic
    async with asyncio.TaskGroup() as loops:
        loops.create_task(collect(run))
        loops.create_task(train(run))
    sys.stdout.write("the final evaluation hangs\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main(loaded: Loaded[RunConfig]) -> int:
    """Run it."""
    return launch(loaded, episode, script, critic=loaded.config.critic is not None)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m tests.loop.hanging_evaluation", description="Hangs after training.")

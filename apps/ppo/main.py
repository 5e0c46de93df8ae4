"""PPO with a critic, fully asynchronous.

    python -m apps.ppo.main --config configs/ppo/tiny.yaml

As in `apps/grpo/main.py`, an episode makes one sample, and two loops, which never wait for each other, make a run. The
baseline of a token's advantage comes not from other answers to the same prompt but from a critic: a second model, which
learns the expected return from each token on. So a prompt needs only one sample.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from goaly.base.config import Loaded, run_cli
from goaly.plan.run_config import RunConfig

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.prompts.prompt import Prompt
    from goaly.rollout.episode import EpisodeContext
    from goaly.run.run import Run
    from goaly.trajectory import Trajectory


async def episode(prompt: Prompt, context: EpisodeContext) -> Trajectory:
    """Ask the policy once and score its answer."""
    from goaly.rollout.episode import Episode

    question = context.render(prompt)
    answer = await context.policy.sample(question)
    score = await context.reward(prompt, answer.text)
    return Episode(prompt, question, context.sample_index).wrote(answer).finish(score)


async def collect(run: Run) -> None:
    """Start a group of episodes for each ticket; every group ends in the backlog."""
    async with asyncio.TaskGroup() as groups:
        async for ticket in run.backlog.tickets():
            groups.create_task(run.rollouts.group(ticket, run.prompts.of(ticket)))


async def train(run: Run) -> None:
    """Add the critic's values to each batch, then train the policy and the critic on it at the same time."""
    assert run.critic is not None, "launch refuses a config without a critic"
    async for batch in run.backlog.batches(run.config.steps):
        if run.reference is not None:
            await run.reference.annotate(batch)
        await run.critic.annotate(batch)
        async with asyncio.TaskGroup() as steps:
            actor = steps.create_task(run.trainer.step(batch))
            critic = steps.create_task(run.critic.step(batch))
        policy_version = await run.trainer.publish()
        await run.backlog.trained(batch, policy_version)
        await run.report(batch, actor.result() | critic.result())


async def ppo(run: Run) -> None:
    """Evaluate, train, evaluate again."""
    await run.evaluate()
    async with asyncio.TaskGroup() as loops:
        loops.create_task(collect(run))
        loops.create_task(train(run))
    await run.evaluate()


def main(loaded: Loaded[RunConfig]) -> int:
    """Run PPO with this config."""
    from goaly.run.launch import launch

    return launch(loaded, episode, ppo, critic=True)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.ppo.main", description="PPO with a critic, fully asynchronous.")

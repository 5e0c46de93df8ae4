"""GRPO, fully asynchronous. START HERE: this file is the algorithm.

    python -m apps.grpo.main --config configs/grpo/tiny.yaml

An episode makes one sample. Two loops, which never wait for each other, make a run: `collect` starts groups of episodes
as fast as the staleness bound admits them, `train` turns finished groups into new policy versions. With
`max_staleness=0` the same two loops are synchronous.
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
    """Train the next policy version on each batch, and publish it to the generators at once."""
    async for batch in run.backlog.batches(run.config.steps):
        if run.reference is not None:
            await run.reference.annotate(batch)
        metrics = await run.trainer.step(batch)
        policy_version = await run.trainer.publish()
        await run.backlog.trained(batch, policy_version)
        await run.report(batch, metrics)


async def grpo(run: Run) -> None:
    """Evaluate, train, evaluate again."""
    await run.evaluate()
    async with asyncio.TaskGroup() as loops:
        loops.create_task(collect(run))
        loops.create_task(train(run))
    await run.evaluate()


def main(loaded: Loaded[RunConfig]) -> int:
    """Run GRPO with this config."""
    from goaly.run.launch import launch

    return launch(loaded, episode, grpo)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.grpo.main", description="GRPO, fully asynchronous.")

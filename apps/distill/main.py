"""On-policy distillation, fully asynchronous: the policy writes, a teacher says how likely it finds each token.

    python -m apps.distill.main --config configs/distill/tiny.yaml

As in `apps/grpo/main.py`, an episode makes one sample, and two loops, which never wait for each other, make a run. The
teacher is the model of the section `reference`: another folder, an earlier version of the policy, or the policy with
more in its context (`rollout.hint`, or a trajectory's `taught`). With `loss.reward_weight=0` rewards only measure.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from goaly.base.config import Loaded, run_cli
from goaly.base.errors import ConfigError
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
    """Let the teacher judge each batch, then train the policy to be more like it."""
    teacher = run.reference
    assert teacher is not None, "main refuses a config without a teacher"
    async for batch in run.backlog.batches(run.config.steps):
        await teacher.annotate(batch)
        metrics = await run.trainer.step(batch)
        policy_version = await run.trainer.publish()
        await run.backlog.trained(batch, policy_version)
        await run.report(batch, metrics)


async def distill(run: Run) -> None:
    """Evaluate, train, evaluate again."""
    await run.evaluate()
    async with asyncio.TaskGroup() as loops:
        loops.create_task(collect(run))
        loops.create_task(train(run))
    await run.evaluate()


def main(loaded: Loaded[RunConfig]) -> int:
    """Distil with this config."""
    from goaly.run.launch import launch

    if loaded.config.loss.distill is None:
        raise ConfigError(["loss.distill=null: must be a section, because this script distils; `{}` has the defaults"])
    return launch(loaded, episode, distill)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.distill.main", description="On-policy distillation, asynchronous.")

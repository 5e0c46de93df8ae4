"""GRPO that waits before a training step until a test writes to the FIFO `<run_dir>.go`."""

import asyncio

from apps.grpo.main import episode, grpo
from goaly.backlog.batch import BatchHandle
from goaly.base.config import Loaded, run_cli
from goaly.plan.run_config import RunConfig
from goaly.run.launch import launch
from goaly.run.run import Run

WAITS_BEFORE_STEP = 10


async def script(run: Run) -> None:
    """Run GRPO, with the wait."""
    step = run.trainer.step

    async def step_after_go(batch: BatchHandle) -> dict[str, float]:
        if batch.id == WAITS_BEFORE_STEP:
            await asyncio.to_thread(run.run_dir.with_suffix(".go").read_bytes)  # unblocked by the test
        return await step(batch)

    run.trainer.step = step_after_go
    await grpo(run)


def main(loaded: Loaded[RunConfig]) -> int:
    """Run it."""
    return launch(loaded, episode, script)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m tests.loop.waiting_for_go", description="Waits for a test.")

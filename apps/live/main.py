"""Learn from live traffic: serve the policy, record, judge, train. START HERE.

    python -m apps.live.main --config configs/live/tiny.yaml
    python -m apps.live.main status RUN

Clients need the address that is printed, and a key. A ticket's group is the next batch of their turns that have a
reward (`src/goaly/live/worker.py`); the training loop is that of `apps/grpo/main.py`. When training fails, the last
version is served on.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from apps.grpo.main import episode, train
from goaly.base.config import Loaded, run_cli
from goaly.base.errors import ConfigError, RunFailed
from goaly.plan.run_config import RunConfig

if TYPE_CHECKING:  # `--help` does not wait for torch
    from goaly.run.run import Run


async def collect(run: Run) -> None:
    """Ask for a batch of turns with a reward for each ticket; every batch ends in the backlog."""
    from goaly.prompts.prompt import Prompt

    async with asyncio.TaskGroup() as batches:
        async for ticket in run.backlog.tickets():
            nobody_asks = Prompt(id=f"live-{ticket.index}", source="live", messages=())
            batches.create_task(run.rollouts.group(ticket, nobody_asks))


async def live(run: Run) -> None:
    """Collect and train, and serve in any case."""
    if run.listeners is not None:
        run.say(f"serving at {run.listeners.addresses[0]}")
    async with asyncio.TaskGroup() as loops:
        collecting = loops.create_task(collect(run))
        try:
            await train(run)
        except RunFailed as error:
            run.say(f"training has stopped, and the last version is served: {error}")
            await asyncio.Future()  # ended by a signal, or by a failure of what serves
        if run.gate is not None and run.gate.promotion.stopped:
            await asyncio.Future()  # serves on
        collecting.cancel()  # its groups wait for turns


def main(loaded: Loaded[RunConfig]) -> int:
    """Serve, and learn from, the traffic of this config."""
    from goaly.run.launch import launch

    if loaded.config.live is None:
        raise ConfigError(["live=null: must be a section, because this script serves; `{}` has the defaults"])
    return launch(loaded, episode, live, live=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["status"]:
        from goaly.live.status import status_text

        try:
            sys.stdout.write(status_text(Path(sys.argv[2] if len(sys.argv) > 2 else "")) + "\n")
        except ConfigError as problem:
            sys.exit(str(problem))
        sys.exit()
    run_cli(main, RunConfig, prog="python -m apps.live.main", description="Learn from live traffic.")

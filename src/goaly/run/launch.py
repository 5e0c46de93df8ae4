"""Runs a script with a loaded config: the run folder, signals, error messages and the exit code.

0 finished   1 failed, with one message that names the actor and the cause   130 stopped by Ctrl-C (a second one stops
at once)
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.config import Loaded, to_yaml
from goaly.errors import ConfigError, first_error
from goaly.run.config import RunConfig
from goaly.telemetry import logs, spans

if TYPE_CHECKING:
    from goaly.rollout.episode import EpisodeFunction
    from goaly.run.run import Run

logger = logging.getLogger(__name__)

INTERRUPTED = 130


def launch(
    loaded: Loaded[Any],
    episode: "EpisodeFunction",
    script: "Callable[[Run], Awaitable[None]]",
    *,
    critic: bool = False,
) -> int:
    """Run `script(run)` with a started run of this config; the exit code. `critic`: whether the script trains one."""
    config: RunConfig = loaded.config
    if (config.critic is not None) != critic:
        raise ConfigError(
            ["critic=null: must be a section, because this script trains a critic; `critic: {}` has the defaults"]
            if critic
            else ["critic: is for a script that trains one, such as apps.ppo.main; this one does not"]
        )
    from goaly.plan.dry_run import check_this_machine, describe

    if loaded.dry_run:
        sys.stdout.write(describe(config))
        return 0
    check_this_machine(config)
    run_dir = make_run_dir(config)
    spans.configure(run_dir if config.telemetry.trace else None, "controller")
    with logs.controller(run_dir / "logs" / "controller.log"):
        try:
            return asyncio.run(_main(config, episode, script, run_dir))
        except asyncio.CancelledError:
            return INTERRUPTED


async def _main(
    config: RunConfig, episode: "EpisodeFunction", script: "Callable[[Run], Awaitable[None]]", run_dir: Path
) -> int:
    from goaly.run.start import started  # imports Monarch and torch, which a dry run does not need

    _stop_on_signals()
    try:
        async with started(config, episode, run_dir) as run:
            await script(run)
    except BaseExceptionGroup as group:
        error = first_error(group)
        logger.error("%s", error, exc_info=group if logger.isEnabledFor(logging.DEBUG) else None)
        logger.error("the run failed; its records are in %s", run_dir)
        return 1
    sys.stdout.write(f"{run.conclusion} in {time.monotonic() - run.started:.0f} s\n")
    return 0


def make_run_dir(config: RunConfig) -> Path:
    """A new run folder, with the resolved config in it."""
    run_dir = Path(config.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))
    if (run_dir / "config.yaml").exists():
        raise ConfigError([f"run_dir={run_dir}: holds a run already; name another folder"])
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return run_dir


def _stop_on_signals() -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            os._exit(INTERRUPTED)  # the run's processes die with this one
        stopping = True
        logger.warning("stopping; once more stops at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)

"""Runs a script with a loaded config: the run folder, signals, error messages and the exit code.

0 finished   1 failed, with one message that names the actor and the cause   130 stopped by Ctrl-C, or by SIGTERM after
the current step and a checkpoint of it (a second Ctrl-C stops at once)

When a process that is not replaced dies, the controller stops the others, and resumes the run under its own process id,
unless that has happened `checkpoint.restarts` times since the last training step.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.base.atomic_files import put_file, writing
from goaly.base.config import RUN_CONFIG, Loaded, to_yaml
from goaly.base.errors import ConfigError, ParityError, first_error, root_cause
from goaly.base.process import become, import_ahead
from goaly.base.telemetry import process_logs, spans
from goaly.plan.run_config import RunConfig
from goaly.reward.verifier_trial import trial
from goaly.run.resume import count_restart, lock

if TYPE_CHECKING:
    from goaly.rollout.episode import EpisodeFunction
    from goaly.run.run import Run

logger = logging.getLogger(__name__)

INTERRUPTED = 130


class _Restart(Exception):
    """The run is to be resumed."""


def launch(
    loaded: Loaded[Any],
    episode: "EpisodeFunction",
    script: "Callable[[Run], Awaitable[None]]",
    *,
    critic: bool = False,
    agent: bool = False,
    coding: bool = False,
    live: bool = False,
) -> int:
    """Run `script(run)` with a started run of this config; the exit code. `critic`: whether the script trains one.
    `agent` and `coding`: whether its episodes run that of the config. `live`: whether it learns from live traffic."""
    config: RunConfig = loaded.config
    for section, is_run in (("agent", agent), ("coding", coding), ("live", live)):
        if getattr(config, section) is not None and not is_run:
            raise ConfigError(
                [f"{section}: is for a script that runs one, such as apps.{section}.main; this one does not"]
            )
    if (config.critic is not None) != critic:
        raise ConfigError(
            ["critic=null: must be a section, because this script trains a critic; `critic: {}` has the defaults"]
            if critic
            else ["critic: is for a script that trains one, such as apps.ppo.main; this one does not"]
        )
    plan = _checked(config, dry_run=loaded.dry_run)
    if loaded.dry_run:
        sys.stdout.write(plan)
        return 0
    with ExitStack() as opened:
        with writing(f"run_dir={loaded.resume or config.run_dir}"):
            run_dir = make_run_dir(config) if loaded.resume is None else loaded.resume
            held = lock(run_dir)
            if loaded.resume is not None:
                write_config(run_dir, config)
            spans.configure(run_dir if config.telemetry.trace else None, "controller")
            opened.enter_context(process_logs.controller(run_dir / "logs" / "controller.log"))
        try:
            may_restart = loaded.arguments == tuple(sys.argv[1:])  # or the same command would not resume this run
            return asyncio.run(_main(config, episode, script, run_dir, may_restart=may_restart))
        except asyncio.CancelledError:
            return INTERRUPTED
        except _Restart:
            script_arguments = len(sys.argv) - 1
            become([*sys.orig_argv[1 : -script_arguments or None], "--resume", str(run_dir)])
        finally:
            os.close(held)


def _checked(config: RunConfig, *, dry_run: bool) -> str:
    """The plan of a dry run, else nothing; a ConfigError with all reasons why the run can't start."""
    tried = trial(config.reward, config.evaluation.verifiers_by_key())  # beside the next line's imports
    from goaly.plan.dry_run import check_this_machine, describe

    plan, problems = "", []
    try:
        if dry_run:
            plan = describe(config)
        else:
            check_this_machine(config)
    except ConfigError as error:
        problems = error.problems
    if problems := [*problems, *tried.result()]:
        raise ConfigError(problems)
    return plan


async def _main(
    config: RunConfig,
    episode: "EpisodeFunction",
    script: "Callable[[Run], Awaitable[None]]",
    run_dir: Path,
    *,
    may_restart: bool,
) -> int:
    import_ahead(["goaly.run.start"])  # and with it Monarch and torch, which a dry run does not need
    from goaly.base.actors import SupervisionError
    from goaly.run.start import POLICY_FOLDER, started

    stop = _StopSignals(config.checkpoint.grace_seconds)
    try:
        async with started(config, episode, run_dir, stop.of) as run:
            await script(run)
    except BaseExceptionGroup as group:
        error = first_error(group)
        logger.error("%s", error, exc_info=group if logger.isEnabledFor(logging.DEBUG) else None)
        if isinstance(root_cause(error.__cause__ or error), ParityError):
            saved = run_dir / POLICY_FOLDER
            weights = f" model.path={saved}" if saved.exists() else ""
            command = f"python -m goaly.parity --config {run_dir / RUN_CONFIG}{weights}"
            logger.error("this searches for the operation that computes other bits: %s", command)
        run = stop.run
        if stop.stopping:
            return INTERRUPTED
        is_death = run is not None and (run.lost_actors or isinstance(error.__cause__, SupervisionError))
        if may_restart and run is not None and is_death and count_restart(config, run.policy_version):
            raise _Restart from None
        logger.error("the run failed; its records are in %s", run_dir)
        return 1
    sys.stdout.write(f"{run.conclusion} in {time.monotonic() - run.started:.0f} s\n")
    return 0


def make_run_dir(config: RunConfig) -> Path:
    """A new run folder, with the resolved config in it."""
    run_dir = Path(config.run_dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))
    if (run_dir / RUN_CONFIG).exists():
        raise ConfigError(
            [f"run_dir={run_dir}: holds a run already; continue it with --resume, or name another folder"]
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(run_dir, config)
    return run_dir


def write_config(run_dir: Path, config: RunConfig) -> None:
    """Write the resolved config into the run's folder, whole or not at all."""
    put_file(run_dir / RUN_CONFIG, to_yaml(config).encode())


class _StopSignals:
    """Ends the task that made it at the first SIGINT, and at the first SIGTERM after a checkpoint of the current step,
    which may take `grace_seconds`. A SIGINT after that ends the process."""

    def __init__(self, grace_seconds: float):
        task = asyncio.current_task()
        assert task is not None
        self.run: Run | None = None
        self._cancel = task.cancel
        self._grace_seconds = grace_seconds
        self.stopping = False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)

    def of(self, run: "Run") -> None:
        """Stop this run."""
        self.run = run

    def _interrupt(self) -> None:
        if self.stopping:
            os._exit(INTERRUPTED)  # the run's processes die with this one
        self._begin("once more stops at once")
        self._cancel()

    def _terminate(self) -> None:
        if self.stopping:
            return  # schedulers repeat it
        self._begin("Ctrl-C stops at once")
        too_late = asyncio.get_running_loop().call_later(self._grace_seconds, self._cancel)

        def stop() -> None:
            too_late.cancel()  # or it would interrupt the run's end
            self._cancel()

        if self.run is None or not self.run.stop_after_step(stop):
            stop()

    def _begin(self, how: str) -> None:
        self.stopping = True
        logger.warning("stopping; %s", how)

"""The first steps of a run that resumes: its folder is locked, and restarts are counted.

A run is resumed by `--resume`, or by itself after a death that it could not mend (`launch.py`). It goes on from its
newest checkpoint and its log (`start.py`, `journal/run_log.py`): the trainer trains the batches after the checkpoint
again, and the queue, the prompts and the digests go on where the log ends. `plan/resumed_settings.py` has the settings
that may change.

    run-9: One process at a time works on a run folder.
"""

import fcntl
import logging
import os
from pathlib import Path

from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
RESTARTS = "GOALY_RESTARTS"
"""Environment variable of a run that resumed itself: how many times without a new version, and the newest version."""


def lock(run_dir: Path) -> int:
    """Hold the run folder until this process ends; ConfigError if another process does."""
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # run-9; freed by the end of the process
    except OSError:
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError([f"run_dir={run_dir}: is in use by process {holder}; end it before this run"]) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def count_restart(config: RunConfig, policy_version: int) -> bool:
    """Count a restart at this version; False if there were too many since the last new version."""
    count, _, version = os.environ.get(RESTARTS, "0@-1").partition("@")
    restarts = int(count) + 1 if policy_version <= int(version) else 1
    if restarts > config.checkpoint.restarts:
        return False
    os.environ[RESTARTS] = f"{restarts}@{max(policy_version, int(version))}"
    logger.warning("resuming the run: restart %d of %d without a new step", restarts, config.checkpoint.restarts)
    return True

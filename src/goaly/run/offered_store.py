"""The weight store of a run under way, for processes of its machine that are no part of the run.

The file `store.handle` in the run's folder names it. Readers that join it from outside are like the run's generators:
the trainer does not wait for them, and what they hold is free once their process ends.

The file names the store that the trainer publishes to. One that the end of a controller left behind names no store.
"""

import logging
import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

from goaly.base.atomic_files import put_file
from goaly.base.process import ProcessMark, is_running, this_process

if TYPE_CHECKING:
    from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

STORE_FILE = "store.handle"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedStore:
    """A store, and the controller of its run."""

    store: "WeightStore"
    controller: ProcessMark


def offer(run_dir: Path, store: "WeightStore") -> None:
    """Let processes of this machine read from this store, which may replace another one."""
    offered = OfferedStore(store=store, controller=this_process())
    try:
        put_file(run_dir / STORE_FILE, cloudpickle.dumps(offered))
    except OSError as error:  # the disk is full
        logger.warning("%s cannot be written, the run cannot be followed: %s", run_dir / STORE_FILE, error)


def withdraw(run_dir: Path) -> None:
    """Offer no store any more."""
    with suppress(OSError):  # the end of the controller withdraws it, too
        (run_dir / STORE_FILE).unlink(missing_ok=True)


class StoreFile:
    """The store that a run's folder names."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / STORE_FILE
        self._content = b""
        self._offered: OfferedStore | None = None

    def read(self) -> "WeightStore | None":
        """The store of the run under way, the same object until another one takes its place; None if there is none."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if content != self._content:
            self._content, self._offered = content, pickle.loads(content)
        assert self._offered is not None
        return self._offered.store if is_running(self._offered.controller) else None

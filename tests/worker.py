"""The program of a test worker: a fork that has the libraries (`worker_imports.py`), with which execnet talks.

It makes the fork server of multiprocessing, before anything starts threads, from a fork of itself.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any


def start_fork_server() -> None:
    """Let multiprocessing have its fork server, without another import of the libraries."""
    resource_tracker.ensure_running()
    spawn: Any = util.spawnv_passfds

    def fork(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        util.spawnv_passfds = spawn  # in both
        if pid := os.fork():
            return pid
        forkserver._forkserver._lock = threading.RLock()  # the other process has it
        _keep(descriptors)
        try:
            exec(arguments[-1])
        finally:
            os._exit(0)

    util.spawnv_passfds = fork
    forkserver._forkserver.set_forkserver_preload(["imported_once"])
    forkserver.ensure_running()


def _keep(descriptors: Sequence[int]) -> None:
    """Close all but these; streams lead nowhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) > 2 and descriptor not in descriptors:
            with suppress(OSError):  # that of the list
                os.close(descriptor)


if __name__ == "__main__":
    start_fork_server()
    exec(eval(sys.stdin.readline()))

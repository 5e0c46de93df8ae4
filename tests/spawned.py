"""Processes of tests: forks of the server that `conftest.py` starts."""

import os
import sys

from monarch.actor import ProcMesh, this_host

from goaly.run.fork_server import SHARED, fork_command


def spawn(role: str, count: int = 1, name: str | None = None) -> ProcMesh:
    """Processes with the libraries of a role, which find the modules that this one finds."""
    path = list(sys.path)

    def find() -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)

    command = fork_command(os.environ[SHARED], role)
    return this_host().spawn_procs({"procs": count}, bootstrap=find, name=name or role, bootstrap_command=command)

"""`examples/weights.py` as it is, but that its processes need not import the libraries."""

import os
import runpy
from functools import partialmethod
from pathlib import Path

from monarch.actor import HostMesh

from goaly.run.fork_server import SHARED, fork_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "weights.py"

if __name__ == "__main__":
    command = fork_command(os.environ[SHARED], "trainer")
    HostMesh.spawn_procs = partialmethod(HostMesh.spawn_procs, bootstrap_command=command)
    runpy.run_path(str(EXAMPLE), run_name="__main__")

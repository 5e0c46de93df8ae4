"""Processes that meet as the ranks of one process group: those of a mesh, and those of work outside of a run.

A mesh's processes import this file first, so it imports little.
"""

import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch.actor import Actor, ProcMesh, endpoint

from goaly.base.errors import RunFailed, root_cause

LOWEST_PORT = 10_000
ENOUGH_PORTS = 1_000
"""A range of this many ports is large enough to choose from."""


class Rank(Actor):
    """A process that is to be a rank. Its endpoints return at once."""

    @endpoint
    def address(self) -> tuple[str, int]:
        """The host's name and a port where the other ranks can reach this process."""
        return socket.gethostname(), lasting_port()

    @endpoint
    def set_local_rank(self) -> None:
        """Set LOCAL_RANK to 0 if the process sees one GPU only."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible and "," not in visible:
            os.environ["LOCAL_RANK"] = "0"


async def rendezvous(mesh: ProcMesh, name: str) -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and the like in the processes of a mesh, so that they can form a process group.

    LOCAL_RANK is the index of the rank's GPU among those that its process sees, as torch, torchtitan and vLLM expect.
    A failure is a RunFailed with the processes' `name`.
    """
    from monarch.spmd import setup_torch_elastic_env_async

    try:
        members = mesh.spawn("rendezvous", Rank)
        answers = await members.address.call()
        host, port = min(answers.items(), key=lambda answer: answer[0].rank)[1]
        await setup_torch_elastic_env_async(mesh, host, port)
        await members.set_local_rank.call()
    except Exception as error:  # Monarch's error, which does not name these processes
        raise RunFailed(f"{name} did not start: {root_cause(error)}") from error


def lasting_port() -> int:
    """A free port of this host, outside of the range from which the system gives ports to processes.

    A port of that range may be taken by another process before torch is imported and listens.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [ports for ports in (range(LOWEST_PORT, first), range(last + 1, 1 << 16)) if len(ports) >= ENOUGH_PORTS]
    while True:
        port = random.choice(max(outside, key=len, default=range(LOWEST_PORT, 1 << 16)))
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
        return port


def fork_ranks_from_one_server() -> None:
    """Let the ranks be forks of one process that imports what they need. To be called before the first `in_ranks`."""
    import torch

    from goaly.run.fork_server import FORKED

    if torch.cuda.device_count() == 0:  # an import may initialize CUDA, which a fork cannot use
        multiprocessing.set_forkserver_preload([*FORKED["generator"], *FORKED["trainer"]])


def in_ranks(work: Callable[..., None], ranks: int, arguments: tuple[Any, ...]) -> None:
    """Call `work` in `ranks` processes that can form a process group, with the rank and then these arguments."""
    import torch.multiprocessing

    torch.multiprocessing.start_processes(
        _in_rank, (work, ranks, lasting_port(), *arguments), nprocs=ranks, start_method="forkserver"
    )


def _in_rank(rank: int, work: Callable[..., None], ranks: int, port: int, *arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    work(rank, *arguments)
    sys.stdout.flush()
    os._exit(0)  # libraries' threads would take seconds to end

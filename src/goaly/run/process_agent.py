"""The actor that the controller has in every process of a run, and the rendezvous of a mesh's processes.

Processes import this file first, so it imports little.
"""

import os
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor, ProcMesh, endpoint

from goaly.base.process import ProcessMark, this_host, this_process

if TYPE_CHECKING:
    from goaly.plan.cluster import Host

LOWEST_PORT = 10_000
ENOUGH_PORTS = 1_000
"""A range of this many ports is large enough to choose from."""


class ProcessAgent(Actor):
    """Answers for the process that it is in. Its endpoints return at once."""

    @endpoint
    def mark(self) -> ProcessMark:
        """The mark of the process."""
        return this_process()

    @endpoint
    def beat(self) -> bool:
        """The answer to a heartbeat: the process can run Python."""
        return True

    @endpoint
    def machine(self) -> "tuple[str, Host]":
        """A unique name of the machine, and its GPUs and cores."""
        from goaly.plan.cluster import this_machine

        return this_host(), this_machine()

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


async def rendezvous(mesh: ProcMesh) -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and the like in the processes of a mesh, so that they can form a process group.

    LOCAL_RANK is the index of the rank's GPU among those that its process sees, as torch, torchtitan and vLLM expect.
    """
    from monarch.spmd import setup_torch_elastic_env_async

    agents = mesh.spawn("rendezvous", ProcessAgent)
    answers = await agents.address.call()
    host, port = min(answers.items(), key=lambda answer: answer[0].rank)[1]
    await setup_torch_elastic_env_async(mesh, host, port)
    await agents.set_local_rank.call()


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

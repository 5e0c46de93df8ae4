"""Where the processes of a mesh meet to become a process group of torch."""

import os
import random
import socket
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint
from monarch.spmd import setup_torch_elastic_env_async

LOWEST = 10_000
ENOUGH = 1_000
"""Ports in a row that are worth choosing from."""


async def meet(mesh: Any) -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and the rest of it in the mesh's processes.

    LOCAL_RANK is the number of the rank's GPU among those that its process sees, as torch, torchtitan and vLLM take it.
    """
    members = mesh.spawn("meeting", _Member)
    answers = await members.place.call()
    host, port = min(answers.items(), key=lambda answer: answer[0].rank)[1]
    await setup_torch_elastic_env_async(mesh, host, port)
    await members.number_gpu.call()


def lasting_port() -> int:
    """A free port of this host that the system gives to nobody who doesn't ask for it by number.

    One that it hands out can be somebody else's by the time torch has been imported and listens there.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [ports for ports in (range(LOWEST, first), range(last + 1, 1 << 16)) if len(ports) >= ENOUGH]
    while True:
        port = random.choice(max(outside, key=len, default=range(LOWEST, 1 << 16)))
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
        return port


class _Member(Actor):
    @concurrent_endpoint
    async def place(self) -> tuple[str, int]:
        """Where the others would find this process."""
        return socket.gethostname(), lasting_port()

    @concurrent_endpoint
    async def number_gpu(self) -> None:
        """Say which GPU to use where it is not the one of the rank's number on its host: where one alone is seen."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible and "," not in visible:
            os.environ["LOCAL_RANK"] = "0"

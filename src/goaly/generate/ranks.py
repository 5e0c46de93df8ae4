"""How the tensor-parallel ranks of one replica stay in step: rank 0 decides, the others hear it over gloo.

Invariants
    GR-1  Every rank's engine gets the same commands in the same order: rank 0 broadcasts a round before acting on it.
    GR-2  An idle rank blocks in a receive; it neither spins nor wakes.
    GR-3  No named shared memory or semaphore outlives the start of the engines: what needs a name to be opened by
          the other ranks is unlinked once they have it, so a killed run leaves nothing behind.
"""

import glob
import multiprocessing
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOREVER = timedelta(days=3650)
"""No timeout: an idle replica waits for hours. What ends a wait for a dead peer is the connection that closes, or the
service, which kills every rank of a replica when one has died (GS-2)."""


class Link:
    """An ordered channel from rank 0 to its peers, and a vote of all ranks. One thread per link and rank uses it."""

    def __init__(self) -> None:
        """Collective: all ranks make their links in the same order, after torch.distributed is up."""
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)
        self.rank = dist.get_rank()

    def send(self, message: Any) -> None:
        """Rank 0: give every peer this message."""
        dist.broadcast_object_list([message], src=0, group=self._group)

    def receive(self) -> Any:
        """Peers: the next message; blocks until rank 0 sends one or dies (GR-2)."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def all_agree(self, yes: bool) -> bool:
        """All ranks: whether every one of them said yes."""
        vote = torch.tensor([int(yes)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())


def unname_semaphores() -> None:
    """Before an engine's start: give vLLM and its progress bars locks that have no name to leave behind (GR-3).

    Under the start method "spawn", which Monarch's processes have, a lock keeps its name until its process ends well.
    """
    from tqdm.std import TqdmDefaultWriteLock
    from vllm.v1.executor import uniproc_executor

    nameless = multiprocessing.get_context("fork")
    uniproc_executor.Lock = nameless.Lock
    if not hasattr(TqdmDefaultWriteLock, "mp_lock"):
        TqdmDefaultWriteLock.mp_lock = nameless.RLock()


def unlink_what_all_hold_open() -> None:
    """After the engines' start: unlink vLLM's message queues (GR-3)."""
    from vllm.distributed import parallel_state

    for group in (parallel_state.get_world_group(), parallel_state.get_tp_group()):
        ring = getattr(group.mq_broadcaster, "buffer", None)
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False


def name_shared_memory_for_this_run() -> None:
    """Make vLLM's CPU ranks name their shared memory uniquely and unlink the names at once (GR-3).

    Left alone it uses one constant name, which two replicas on a host would share and a killed run would leave behind.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    if getattr(shared, "named_by_goaly", False):
        return
    open_all = shared._init_cpu_shm

    def unique_name(communicator: Any) -> str:
        name = getattr(communicator, "goaly_name", None)
        if name is None:
            box = [f"goaly-{uuid.uuid4().hex}"]
            dist.broadcast_object_list(box, src=communicator.ranks[0], group=communicator.device_group)
            name = communicator.goaly_name = box[0]
        return name

    def open_and_unlink(self: Any) -> int:
        handle = open_all(self)  # ends with a barrier: every rank holds every segment open
        for path in Path("/dev/shm").glob(f"*{glob.escape(self.group_name)}*"):
            path.unlink(missing_ok=True)
        return handle

    shared.make_group_name = staticmethod(unique_name)
    shared._init_cpu_shm = open_and_unlink
    shared.named_by_goaly = True

"""No names in shared memory for vLLM's engines.

Invariants
    EN-4  No named shared memory or semaphore outlives the start of the engines, so a killed run leaks none: a name that
          other ranks need is unlinked once they have opened it.
"""

import glob
import multiprocessing
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist


def unname_semaphores() -> None:
    """Before an engine's start: give vLLM and its progress bars locks without names (EN-4).

    Under the start method "spawn", which Monarch's processes have, a lock keeps its name until its process ends well.
    """
    from tqdm.std import TqdmDefaultWriteLock
    from vllm.v1.executor import uniproc_executor

    nameless = multiprocessing.get_context("fork")
    uniproc_executor.Lock = nameless.Lock
    if not hasattr(TqdmDefaultWriteLock, "mp_lock"):
        TqdmDefaultWriteLock.mp_lock = nameless.RLock()


def leave_no_named_shared_memory() -> None:
    """Before an engine's start: let no shared memory of vLLM's ranks keep a name (EN-4).

    vLLM's CPU ranks use one constant name by default: two replicas on a host would share it, and a killed run would
    leak it. They get unique names, which are unlinked at once. Message queues would keep their names until the end of
    the start, and are not made: the rare objects that ranks exchange go through the process group.
    """
    from vllm.distributed import parallel_state
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

    make_group: Any = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = lambda *arguments, **options: make_group(
        *arguments, **{**options, "use_message_queue_broadcaster": False}
    )
    shared.make_group_name = staticmethod(unique_name)
    shared._init_cpu_shm = open_and_unlink
    shared.named_by_goaly = True

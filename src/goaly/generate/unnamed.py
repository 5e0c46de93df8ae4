"""No names in shared memory for vLLM's engines.

Engines make no named shared memory or semaphore, so a killed run leaks none.
"""

import multiprocessing
from typing import Any

from goaly.numerics.cpu_ranks import CpuRanks


def unname_semaphores() -> None:
    """Before an engine's start: give vLLM and its progress bars locks without names.

    Under the start method "spawn", which Monarch's processes have, a lock keeps its name until its process ends well.
    """
    from tqdm.std import TqdmDefaultWriteLock
    from vllm.v1.executor import uniproc_executor

    nameless = multiprocessing.get_context("fork")
    uniproc_executor.Lock = nameless.Lock
    if not hasattr(TqdmDefaultWriteLock, "mp_lock"):
        TqdmDefaultWriteLock.mp_lock = nameless.RLock()


def leave_no_named_shared_memory() -> None:
    """Before an engine's start: let vLLM's ranks make no named shared memory.

    Ranks on a CPU get ours. Message queues would keep names until the end of the start, and are not made: the rare
    objects that ranks exchange go through the process group.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator

    if cpu_communicator._CPUSHMDistributed is CpuRanks:
        return
    cpu_communicator._CPUSHMDistributed = CpuRanks
    make_group: Any = parallel_state.init_model_parallel_group
    parallel_state.init_model_parallel_group = lambda *arguments, **options: make_group(
        *arguments, **{**options, "use_message_queue_broadcaster": False}
    )

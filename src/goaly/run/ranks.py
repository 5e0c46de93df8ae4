"""Processes that are the ranks of one group, for work outside of a run."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from goaly.run.fork_server import FORKED
from goaly.run.process_agent import lasting_port


def fork_ranks_from_one_server() -> None:
    """Let the ranks be forks of one process that imports what they need. To be called before the first `in_ranks`."""
    if torch.cuda.device_count() == 0:  # an import may initialize CUDA, which a fork cannot use
        multiprocessing.set_forkserver_preload([*FORKED["generator"], *FORKED["trainer"]])


def in_ranks(work: Callable[..., None], ranks: int, arguments: tuple[Any, ...]) -> None:
    """Call `work` in `ranks` processes that can form a process group, with the rank and then these arguments."""
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

"""The processes of a supervised run: one, or those that torchrun started."""

import os

from apps.sft.config import SftConfig


def is_first_rank() -> bool:
    """Whether this process writes the files."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_all_ranks() -> None:
    """Return once every rank is here."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def join_ranks(config: SftConfig) -> None:
    """Meet the other ranks that torchrun started, if there are any."""
    from goaly.train.rank_thread import join_process_group

    join_process_group(config.trainer.threads, int(os.environ.get("WORLD_SIZE", "1")))

"""The device of this process."""

import os

import torch

from goaly.errors import ConfigError


def local_device() -> torch.device:
    """This process's device: the only visible GPU or the one with number LOCAL_RANK, without GPUs the CPU."""
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = 0 if count == 1 else rank
    if index >= count:
        raise ConfigError([f"LOCAL_RANK={rank}: must be below {count}, the number of GPUs that this process sees"])
    return torch.device("cuda", index)


def use_local_device() -> torch.device:
    """Set the calling thread's device to this process's; CUDA has a current device for each thread."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device

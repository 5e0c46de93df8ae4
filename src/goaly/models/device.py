"""The device of this process, for torch and torchtitan, and its memory of the host that GPUs copy from."""

import os
import sys

import torch

from goaly.base.errors import ConfigError


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


def prepare_torchtitan() -> torch.device:
    """Set torchtitan's device to the GPU if there is one, else the CPU, and return this process's device.

    It must run before a model is built, because torchtitan assumes a GPU by default.
    """
    import torchtitan.tools.utils  # noqa: F401 - so that it is among the modules below

    kind, backend = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", torch.cpu)
    # Modules that are already loaded have copies of these names.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            for attribute, value in (("device_type", kind), ("device_module", backend)):
                if hasattr(module, attribute):
                    setattr(module, attribute, value)
    return local_device() if kind == "cuda" else torch.device("cpu")


def use_local_device() -> torch.device:
    """Set the calling thread's device to this process's; CUDA has a current device for each thread."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keep_pinned_sizes()
    return device


def keep_pinned_sizes() -> None:
    """Let torch pin as much memory as a tensor has: it would round each one up to a power of two."""
    chosen = torch._C._accelerator_getAllocatorSettings()  # by the user, and those stay in force
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, ("pinned_max_round_threshold_mb:1", chosen))))

"""Settings of the weight path."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Literal

from annotated_types import Ge

from goaly.base.config.settings import PositiveFloat, PositiveInt, Section, Settings

NO_TORCHSTORE = (
    "the package torchstore is not installed; install it (github.com/meta-pytorch/torchstore) or use auto or rdma"
)
MIB = 1 << 20
IN_FLIGHT = 4
"""Buckets that a reader fetches at a time from each rank on another host: enough to keep sender, wire and receiver busy
while one is copied out."""
HEADROOM = 0.05
"""The share of a GPU's memory that must stay free for what a plan does not count: CUDA's context, NCCL's buffers, CUDA
graphs, and the activations and logits of a generator's step."""


class WeightSettings(Settings):
    """How published weights are kept and moved."""

    slots: Annotated[int, Ge(2)] = 3
    """Versions that each trainer rank keeps in memory. With 3, readers may hold two while the trainer writes the next.
    The trainer never waits for a reader: if readers hold all slots, those of the oldest version lose their lease and
    copy a newer one. Raise it if readers take longer than slots - 1 publishes for a copy."""
    transfer_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Floating-point type in which weights are published: float32, bfloat16 or float16; null is `model.dtype`, in which
    generators and a refreshed reference compute. Set float32 for readers that need the exact float32 parameters of a
    bfloat16 model, at twice the bytes."""
    bucket_mib: PositiveFloat = 8.0
    """Size in MiB of the buckets in which weights are staged and sent over the network. Raise it where each transfer
    is costly, as with TorchStore; readers on other hosts need 4 buckets of memory for each trainer rank."""
    transport: Literal["auto", "rdma", "torchstore"] = "auto"
    """How readers reach the trainer's versions. "auto" maps them on the same host and reads them over RDMA (or TCP,
    where there is no such hardware) from others. "rdma" reads them so on the same host, too. "torchstore" keeps them in
    TorchStore, for sites that run it; the package must be installed."""
    verify_every: PositiveInt = 16
    """Every N-th version, and one after a reader has joined, has a digest, which readers compare with that of their
    own parameters. It takes a trainer rank about half a second for each GB that it stages. 1 verifies each version."""
    spare: Literal["auto", "device", "host"] = "auto"
    """Where a generator keeps the weights that it has fetched until it applies them: "device" is the memory of its GPU,
    "host" is the host's, from which applying them takes as long as a copy to the GPU. "auto" is device if 5 % of the
    GPU's memory stay free, and host if not, as `--dry-run` shows. A generator that shares its GPU with a trained role,
    or whose GPU the plan does not know, chooses when it fetches for the first time, by what is free then; set host if
    other programs take that memory later."""

    def of_model(self, dtype: str) -> "WeightSettings":
        """The settings with `dtype`, in which the model computes, as the default of `transfer_dtype`."""
        return replace(self, transfer_dtype=self.transfer_dtype or dtype)

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket in bytes."""
        return int(self.bucket_mib * MIB)

    def _problems(self, at: Section) -> Iterator[str]:
        if self.transport == "torchstore" and find_spec("torchstore") is None:
            yield f"{at.transport}: {NO_TORCHSTORE}"

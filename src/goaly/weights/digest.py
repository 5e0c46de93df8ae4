"""A digest of a model's parameters that does not depend on how they are sharded.

It is the sum of all parameters' sums (`receipts.py`).

Invariants
    PD-1  The digest changes if one element changes. After any other change it is the same with a probability of at
          most about 2**-32, for elements of at most 4 bytes.
    PD-2  The digest is the same on any mesh and device.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from goaly.weights.layout import Layout, share, view
from goaly.weights.placement import gpu_of, layout_of, local
from goaly.weights.receipts import WeightedSum, halves, whole


class Digest:
    """Computes the digest of tensors that all ranks together hold."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, alone: bool = False):
        """`tensors` are what this rank holds; they are read at each call. All ranks must make theirs at once, unless
        this one holds all `alone`."""
        self._tensors = dict(tensors)
        layouts: list[Layout] = [layout_of(tensors)]
        self._several_ranks = several_ranks() and not alone
        if self._several_ranks:
            layouts *= dist.get_world_size()
            dist.all_gather_object(layouts, layouts[0])
        mine = share(layouts)[dist.get_rank() if self._several_ranks else 0]  # each element once
        self._device = gpu_of(tensors) or torch.device("cpu")
        self._sums = [(shard, WeightedSum(shard, self._device)) for shard in mine]

    @torch.no_grad()
    def compute(self) -> str:
        """The digest of the tensors as they are now, on every rank; all ranks must call it."""
        held = {name: local(tensor) for name, tensor in self._tensors.items()}
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for shard, weighted in self._sums:
            total += weighted.of(view(held, shard))
        parts = torch.tensor(halves(int(total)), device=self._device)
        if self._several_ranks:
            dist.all_reduce(parts)
        return f"{whole(*parts.tolist()):016x}"


def gathered(message: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All ranks of the group: the messages of all of them."""
    messages = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1

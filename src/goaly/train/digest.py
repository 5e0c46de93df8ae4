"""A digest of a model's parameters that does not depend on how they are sharded.

It is a sum over all elements, modulo 2**64: the element's bits, read as an integer, times the element's weight. The
weight is the product of an odd pseudo-random number for each index of its position; the numbers of a dim follow from
the parameter's name.

Invariants
    PD-1  The digest changes if one element changes. After any other change it is the same with a probability of at
          most about 2**-32.
    PD-2  The digest is the same on any mesh and device.
"""

import hashlib
from collections.abc import Mapping
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist

from goaly.weights.layout import Layout, Shard, share, view
from goaly.weights.member import gpu_of
from goaly.weights.placement import layout_of, local

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GPU_CHUNK = 1 << 22
"""Elements of a matrix whose products are in GPU memory at once, 8 bytes each."""


class Digest:
    """Computes the digest of tensors that all ranks together hold."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        """`tensors` are what this rank holds; they are read at each call. All ranks must make theirs at once."""
        self._tensors = dict(tensors)
        layouts: list[Layout] = [layout_of(tensors)]
        self._several_ranks = several_ranks()
        if self._several_ranks:
            layouts *= dist.get_world_size()
            dist.all_gather_object(layouts, layouts[0])
        mine = share(layouts)[dist.get_rank() if self._several_ranks else 0]  # each element once
        self._device = gpu_of(tensors) or torch.device("cpu")
        self._weighted = [(shard, *_factors(shard, self._device)) for shard in mine]

    @torch.no_grad()
    def compute(self) -> str:
        """The digest of the tensors as they are now, on every rank; all ranks must call it."""
        held = {name: local(tensor) for name, tensor in self._tensors.items()}
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for shard, row_R, column_C in self._weighted:
            total += _sum(view(held, shard), row_R, column_C)
        low, high = int(total) & 0xFFFFFFFF, int(total) >> 32
        if self._several_ranks:
            halves = torch.tensor([low, high], device=self._device)  # their sums do not overflow
            dist.all_reduce(halves)
            low, high = halves.tolist()
        return f"{(low + (high << 32)) % 2**64:016x}"


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _sum(elements: torch.Tensor, row_R: torch.Tensor, column_C: torch.Tensor) -> torch.Tensor:
    """The sum over the elements of a rectangle, seen as a matrix of its last dim's columns."""
    bits_RC = elements.view(INTEGERS[elements.itemsize]).reshape(len(row_R), len(column_C))
    if bits_RC.is_cuda:
        chunks = bits_RC.split(max(1, GPU_CHUNK // len(column_C)))
        sum_R = torch.cat([(chunk_rC * column_C).sum(1) for chunk_rC in chunks])
    else:  # NumPy multiplies and adds in one pass, without a temporary
        sum_R = torch.from_numpy(np.einsum("rc,c->r", bits_RC.numpy(), column_C.numpy()))
    return (sum_R * row_R).sum()


def _factors(shard: Shard, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a rectangle's elements, as one factor for each row and one for each column."""
    offset, shape = shard.offset or (0,), shard.shape or (1,)
    *leading, column_C = [
        _numbers(f"{shard.name} {dim}", begin, length)
        for dim, (begin, length) in enumerate(zip(offset, shape, strict=True))
    ]
    row_R = reduce(lambda rows, numbers: np.outer(rows, numbers).ravel(), leading, np.ones(1, np.uint64))
    return torch.from_numpy(row_R.view(np.int64)).to(device), torch.from_numpy(column_C.view(np.int64)).to(device)


def _numbers(seed: str, begin: int, length: int) -> np.ndarray:
    """The odd numbers of these indices, from the generator SplitMix64."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little"))
    found = np.arange(begin + 1, begin + length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (found ^ (found >> np.uint64(31))) | np.uint64(1)

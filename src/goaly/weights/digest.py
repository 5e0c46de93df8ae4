"""Digests of weights: a sum over all elements, the same however the tensors are divided, and on any device.

A tensor's sum is over its elements, modulo 2**64: the element's bits, read as an integer, times a number for its place.
Parts of a tensor add up to it. A digest is the sum of all tensors.

The writers stage some versions with a digest, which a reader compares with its own of what it will apply, so a wrong
element, place or part is noticed. The seals, in contrast, only show that a slot was not written during a copy. A reader
that casts has other bits than the digest is of: it sums the elements as they were fetched, and compares the cast
elements with a second cast of these, bit by bit.

    weights-7: A digest changes if one element changes. After any other change it is the same with a probability of at
        most about 2**-32, for elements of at most 4 bytes. It is the same on any mesh and device.
    weights-8: A version with a digest is applied only if the rectangles of all ranks of the reader have that digest
        together, and those that several of them hold have the same sum on each. Rectangles that overlap otherwise, or
        don't cover all published tensors, can't be compared, and the version doesn't count as verified.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from goaly.base.errors import WeightsError
from goaly.weights.dtensor_layout import gpu_of, layout_of, local
from goaly.weights.layout import Extent, Layout, Rectangle, Shard, tile, view
from goaly.weights.reshard_plan import share

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements of a matrix that are compared at once, and whose products are in GPU memory at once, 8 bytes each."""


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
        parts = torch.stack([total & 0xFFFFFFFF, total >> 32])  # halves, whose sums over ranks don't overflow
        if self._several_ranks:
            dist.all_reduce(parts)
        low, high = parts.tolist()
        return f"{(low + (high << 32)) % 2**64:016x}"


def gathered(message: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """All ranks of the group: the messages of all of them."""
    messages = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return messages


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


class WeightedSum:
    """Sums the elements of one rectangle of a tensor, as that place in the tensor demands."""

    def __init__(self, shard: Shard, device: torch.device):
        offset, shape = shard.offset or (0,), shard.shape or (1,)
        *leading, column_C = [
            _numbers(f"{shard.name} {dim}", begin, length)
            for dim, (begin, length) in enumerate(zip(offset, shape, strict=True))
        ]
        row_R = reduce(lambda rows, numbers: np.outer(rows, numbers).ravel(), leading, np.ones(1, np.uint64))
        self._row_R = torch.from_numpy(row_R.view(np.int64)).to(device)
        self._column_C = torch.from_numpy(column_C.view(np.int64)).to(device)

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """The sum, as an int64 that wraps around."""
        row_R, column_C = self._row_R, self._column_C
        bits_RC = elements.view(INTEGERS[elements.itemsize]).reshape(len(row_R), len(column_C))
        if bits_RC.is_cuda:
            chunks = bits_RC.split(max(1, CHUNK // len(column_C)))
            sum_R = torch.cat([(chunk_rC * column_C).sum(1) for chunk_rC in chunks])
        else:  # NumPy multiplies and adds in one pass, without a temporary
            sum_R = torch.from_numpy(np.einsum("rc,c->r", bits_RC.numpy(), column_C.numpy()))
        return (sum_R * row_R).sum()


def digest_of(layout: Layout, elements: Sequence[torch.Tensor]) -> int:
    """The part of these shards in the digest."""
    return sum(_sum(shard, one) for shard, one in zip(layout, elements, strict=True)) % 2**64


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type have the same bits; any NaN is the same as another one."""
    bits = INTEGERS[one.itemsize]
    for here, there in zip(_chunks(one), _chunks(other), strict=True):
        there = there.to(here.device)
        if not torch.equal(here.view(bits), there.view(bits)):
            differs = here.view(bits) != there.view(bits)  # which NaN a cast gives depends on the device
            if not here.is_floating_point() or not (here[differs].isnan() & there[differs].isnan()).all():
                return False
    return True


Part = tuple[str, Rectangle, int]
"""The sum of one rectangle of a published tensor."""


class Check:
    """One reader rank's comparison of a version with its digest."""

    def __init__(self, digest: int, layout: Layout, published: Mapping[str, Shard], where: str):
        """`published` has a shard of each published tensor. `where` says in errors which version this is, and at which
        reader."""
        self.where = where
        self.is_verified = False
        """Whether the version has this digest; False also if it can't be compared (weights-8)."""
        self._digest = digest
        self._layout = layout
        self._published = published
        self._sums = [0] * len(layout)
        self._miscast: str | None = None
        self._casts = [published[shard.name].dtype != shard.dtype for shard in layout]

    def fetched(self, index: int, offset: Extent, fetched: torch.Tensor, target: torch.Tensor) -> None:
        """Sum a rectangle of one of the layout's shards as it was fetched, and compare its cast with `target`.

        Nothing is done if it needs no cast. To be called while `fetched` can be read.
        """
        shard = self._layout[index]
        if not self._casts[index]:
            return
        fetched = fetched.to(target.device)
        start = tuple(begin + moved for begin, moved in zip(shard.offset, offset, strict=True))
        self._sums[index] += _sum(shard.part((start, tuple(fetched.shape))), fetched)
        if self._miscast is None and not same(target, fetched.to(target.dtype)):
            self._miscast = shard.name  # if the slot was written over meanwhile, that is the reason

    def parts(self, elements: Sequence[torch.Tensor]) -> list[Part]:
        """The sums of this rank's rectangles, whose elements these are by now; raises if a cast of them is wrong."""
        if self._miscast is not None:
            raise WeightsError(f"{self.where}: `{self._miscast}` is not what was fetched, cast to this reader's type")
        for index, (shard, one) in enumerate(zip(self._layout, elements, strict=True)):
            if not self._casts[index]:
                self._sums[index] = _sum(shard, one)
        sums = zip(self._layout, self._sums, strict=True)
        return [(shard.name, (shard.offset, shard.shape), total % 2**64) for shard, total in sums]

    def compare(self, ranks: Iterable[Iterable[Part]]) -> None:
        """Compare the sums of these ranks with the digest, if they are comparable; raise if they differ (weights-8)."""
        found: dict[str, dict[Rectangle, int]] = {}
        for name, rectangle, total in chain.from_iterable(ranks):
            if found.setdefault(name, {}).setdefault(rectangle, total) != total:
                raise WeightsError(f"{self.where}: `{name}` differs in two places that have the same part of it")
        if any(
            not tile(tuple(sorted(found.get(name, ()))), shard.global_shape) for name, shard in self._published.items()
        ):
            return
        total = sum(chain.from_iterable(parts.values() for parts in found.values())) % 2**64
        if total != self._digest:
            raise WeightsError(
                f"{self.where}: the weights have the digest {total:016x}, were published with {self._digest:016x}"
            )
        self.is_verified = True


def _sum(shard: Shard, elements: torch.Tensor) -> int:
    return int(WeightedSum(shard, elements.device).of(elements)) % 2**64


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's rows, at most `CHUNK` elements at a time, or one row."""
    if not tensor.dim() or tensor.numel() <= CHUNK:
        return iter((tensor,))
    return iter(tensor.split(max(1, CHUNK * len(tensor) // tensor.numel())))


def _numbers(seed: str, begin: int, length: int) -> np.ndarray:
    """The odd numbers of these indices, from the generator SplitMix64."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little"))
    found = np.arange(begin + 1, begin + length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (found ^ (found >> np.uint64(31))) | np.uint64(1)

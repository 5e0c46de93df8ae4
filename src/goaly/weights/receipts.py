"""Receipts: sums over published tensors, by which a reader shows that it has what the writers staged.

The sum of a tensor is over all of its elements, modulo 2**64: the element's bits, read as an integer, times a number
for its place. Parts of a tensor add up to it, however it is divided. A wrong element, a wrong place and a wrong part
change it; the seals, in contrast, only show that a slot was not written during a copy.

A version has the sums of all tensors if no writer rank stages more than `VERIFIED_BYTES`. Otherwise the tensors take
turns, each as a whole, so that versions have about so many bytes on average.

Invariants
    VS-1  The sum changes if one element changes. After any other change it is the same with a probability of at most
          about 2**-32, for elements of at most 4 bytes.
    VS-2  The sum does not depend on how the tensor is divided among ranks, or on their devices.
    VS-3  Of any `spread` consecutive versions, exactly one has a given tensor's sum.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import prod

import numpy as np
import torch

from goaly.errors import WeightsError
from goaly.weights.layout import Layout, Shard

VERIFIED_BYTES = 32 << 20
"""About so many bytes of each writer rank are summed for a version."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GPU_CHUNK = 1 << 22
"""Elements of a matrix whose products are in GPU memory at once, 8 bytes each."""

Receipt = Mapping[str, int]
"""By name, the sums of some of a version's tensors."""


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
            chunks = bits_RC.split(max(1, GPU_CHUNK // len(column_C)))
            sum_R = torch.cat([(chunk_rC * column_C).sum(1) for chunk_rC in chunks])
        else:  # NumPy multiplies and adds in one pass, without a temporary
            sum_R = torch.from_numpy(np.einsum("rc,c->r", bits_RC.numpy(), column_C.numpy()))
        return (sum_R * row_R).sum()


def periods(layouts: Iterable[Layout]) -> int:
    """Over how many versions the tensors are spread (VS-3)."""
    most = max(sum(shard.bytes for shard in layout) for layout in layouts)
    return max(1, -(-most // VERIFIED_BYTES))


def receipt(layout: Layout, elements: Sequence[torch.Tensor], version: int, spread: int) -> dict[str, int]:
    """This rank's part of the version's sums. The tensors take turns over `spread` versions."""
    found: dict[str, int] = {}
    for shard, one in zip(layout, elements, strict=True):
        if _turn(shard.name, spread) == version % spread:
            found[shard.name] = (found.get(shard.name, 0) + _sum(shard, one)) % 2**64
    return found


def combined(one: Receipt, other: Receipt) -> dict[str, int]:
    """The sums of both ranks."""
    return {name: (one.get(name, 0) + other.get(name, 0)) % 2**64 for name in {**one, **other}}


def halves(total: int) -> tuple[int, int]:
    """The low and the high 32 bits of a sum. Ranks can add such halves as int64 without an overflow."""
    return total & 0xFFFFFFFF, total >> 32


def whole(low: int, high: int) -> int:
    """The sum, modulo 2**64, of which these are the halves, or the added halves of its parts."""
    return (low + (high << 32)) % 2**64


class Parts:
    """One reader rank's parts of a receipt's tensors, and their sums."""

    def __init__(
        self,
        promised: Receipt,
        layout: Layout,
        elements: Sequence[torch.Tensor],
        published: Mapping[str, torch.dtype],
        name: str,
    ):
        """`published` has the type of each published tensor: one that the reader casts cannot be verified. `name` says
        in errors which version this is, and where."""
        self._name = name
        self._promised = promised
        self._sums = dict.fromkeys(promised, 0)
        self._counts = dict.fromkeys(promised, 0)
        self._sizes = dict.fromkeys(promised, 0)
        self.bytes = 0
        """The bytes that were summed; those of a tensor that is never whole are compared with nothing."""
        seen = set()
        for shard, one in zip(layout, elements, strict=True):
            place = (shard.name, shard.offset, shard.shape)  # it may be in two of the reader's tensors
            if shard.name in promised and published[shard.name] == shard.dtype and place not in seen:
                seen.add(place)
                self._sums[shard.name] = (self._sums[shard.name] + _sum(shard, one)) % 2**64
                self._counts[shard.name] += shard.elements
                self._sizes[shard.name] = prod(shard.global_shape)
                self.bytes += shard.bytes

    def check(self) -> None:
        """Raise a WeightsError that names a tensor which this rank has wholly, and not as promised."""
        for name, size in self._sizes.items():
            if size and self._counts[name] == size:
                self._compare(name, self._sums[name])

    def tensor(self) -> torch.Tensor:
        """The rank's parts, to be added to those of the replica's other ranks. A tensor that it has wholly is none."""
        rows = [
            (0, 0, 0) if count == self._sizes[name] else (*halves(self._sums[name]), count)
            for name, count in sorted(self._counts.items())
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)

    def check_total(self, total: torch.Tensor) -> None:
        """The same of the tensors that the ranks with this total of parts have wholly together."""
        for name, (low, high, count) in zip(sorted(self._promised), total.tolist(), strict=True):
            if count and count == self._sizes[name]:
                self._compare(name, whole(low, high))

    def _compare(self, name: str, found: int) -> None:
        if found != self._promised[name]:
            raise WeightsError(
                f"{self._name}: `{name}` has the sum {found:016x}, was published with {self._promised[name]:016x}"
            )


def _sum(shard: Shard, elements: torch.Tensor) -> int:
    return int(WeightedSum(shard, elements.device).of(elements)) % 2**64


def _turn(name: str, spread: int) -> int:
    """The version, modulo `spread`, that has this tensor's sum."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % spread


def _numbers(seed: str, begin: int, length: int) -> np.ndarray:
    """The odd numbers of these indices, from the generator SplitMix64."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little"))
    found = np.arange(begin + 1, begin + length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (found ^ (found >> np.uint64(31))) | np.uint64(1)

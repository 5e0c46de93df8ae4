"""Receipts: sums over published tensors, by which a reader shows that it has what the writers staged.

The sum of a tensor is over all of its elements, modulo 2**64: the element's bits, read as an integer, times a number
for its place. Parts of a tensor add up to it, however it is divided. A wrong element, a wrong place and a wrong part
change it; the seals, in contrast, only show that a slot was not written during a copy.

A reader sums the elements that it will apply. Elements that it casts have other bits than the writers' sums are over:
it sums them as they were fetched, and compares the cast elements with a second cast of these, bit by bit.

A version has the sums of all tensors if no writer rank stages more than `VERIFIED_BYTES`. Otherwise the tensors take
turns, each as a whole, so that versions have about so many bytes on average.

Invariants
    VS-1  The sum changes if one element changes. After any other change it is the same with a probability of at most
          about 2**-32, for elements of at most 4 bytes.
    VS-2  The sum does not depend on how the tensor is divided among ranks, or on their devices.
    VS-3  Of the `spread` versions from each multiple of `spread` on, exactly one has a given tensor's sum. Which one it
          is changes, so a reader that applies only every n-th version verifies all tensors in time, too.
    VS-4  A tensor counts as verified if parts that cover it once have its sum together, and those who hold the same
          part have the same sum of it. All other tensors of a reader count as unverified.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np
import torch

from goaly.errors import WeightsError
from goaly.weights.layout import Extent, Layout, Rectangle, Shard, tile

VERIFIED_BYTES = 32 << 20
"""About so many bytes of each writer rank are summed for a version."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements of a matrix that are compared at once, and whose products are in GPU memory at once, 8 bytes each."""

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
            chunks = bits_RC.split(max(1, CHUNK // len(column_C)))
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
        if _turn(shard.name, version // spread, spread) == version % spread:
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


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type have the same bits; any NaN is the same as another one."""
    for here, there in zip(_chunks(one), _chunks(other), strict=True):
        there = there.to(here.device)
        if not torch.equal(*_as_integers(here, there)):
            bits = INTEGERS[here.itemsize]
            differs = here.view(bits) != there.view(bits)  # which NaN a cast gives depends on the device
            if not here.is_floating_point() or not (here[differs].isnan() & there[differs].isnan()).all():
                return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How much of what a reader has applied it has verified, added over versions.

    Tensors are the published ones of which it has parts; bytes are its own bytes of these.
    """

    tensors: int = 0
    bytes: int = 0
    unverified_tensors: int = 0
    unverified_bytes: int = 0

    def __add__(self, other: "Verified") -> "Verified":
        """Both together."""
        return Verified(
            tensors=self.tensors + other.tensors,
            bytes=self.bytes + other.bytes,
            unverified_tensors=self.unverified_tensors + other.unverified_tensors,
            unverified_bytes=self.unverified_bytes + other.unverified_bytes,
        )


Part = tuple[str, Rectangle, int]
"""The sum of one rectangle of a published tensor."""


class Parts:
    """One reader rank's parts of a version's tensors, and the sums of those that the receipt has."""

    def __init__(self, promised: Receipt, layout: Layout, published: Mapping[str, torch.dtype], where: str):
        """`published` has the type of each published tensor. `where` says in errors which version this is, and at which
        reader."""
        self.where = where
        self.promised = promised
        self._layout = layout
        self._casts = [published[shard.name] != shard.dtype for shard in layout]
        self._sums = {index: 0 for index, shard in enumerate(layout) if shard.name in promised}
        self._shapes = {shard.name: shard.global_shape for shard in layout}
        self._bytes: dict[str, int] = {}
        for shard in layout:
            self._bytes[shard.name] = self._bytes.get(shard.name, 0) + shard.bytes
        self._all_bytes = sum(self._bytes.values())
        self._miscast: str | None = None
        self.verified: set[str] = set()
        """The tensors that have the right sum."""

    def fetched(self, index: int, offset: Extent, fetched: torch.Tensor, target: torch.Tensor) -> None:
        """Sum a rectangle of one of the layout's shards as it was fetched, and compare its cast with `target`.

        Nothing is done if it needs no cast. To be called while `fetched` can be read; `check` raises an error.
        """
        shard = self._layout[index]
        if index not in self._sums or not self._casts[index]:
            return
        fetched = fetched.to(target.device)
        start = tuple(begin + moved for begin, moved in zip(shard.offset, offset, strict=True))
        self._sums[index] += _sum(shard.part((start, tuple(fetched.shape))), fetched)
        if self._miscast is None and not same(target, fetched.to(target.dtype)):
            self._miscast = shard.name

    def check(self, elements: Sequence[torch.Tensor]) -> None:
        """Sum the layout's shards that were not cast. Raise a WeightsError that names a tensor which was cast wrongly,
        or which this rank has wholly, and not as promised."""
        if self._miscast is not None:
            raise WeightsError(f"{self.where}: `{self._miscast}` is not what was fetched, cast to this reader's type")
        for index in self._sums:
            if not self._casts[index]:
                self._sums[index] = _sum(self._layout[index], elements[index])
        self.check_together([self.open()])

    def open(self) -> list[Part]:
        """The sums of this rank's parts of tensors that are not verified yet."""
        shards = ((self._layout[index], total) for index, total in self._sums.items())
        return [
            (shard.name, (shard.offset, shard.shape), total % 2**64)
            for shard, total in shards
            if shard.name not in self.verified
        ]

    def check_together(self, ranks: Iterable[Iterable[Part]]) -> None:
        """Verify the tensors of which these ranks' parts are the whole (VS-4); raise a WeightsError that names a wrong
        one."""
        found: dict[str, dict[Rectangle, int]] = {}
        for name, rectangle, total in chain.from_iterable(ranks):
            if found.setdefault(name, {}).setdefault(rectangle, total) != total:
                raise WeightsError(f"{self.where}: `{name}` differs in two places that have the same part of it")
        for name, parts in found.items():
            if name not in self._shapes or not tile(tuple(sorted(parts)), self._shapes[name]):
                continue
            total, promised = sum(parts.values()) % 2**64, self.promised[name]
            if total != promised:
                raise WeightsError(
                    f"{self.where}: `{name}` has the sum {total:016x}, was published with {promised:016x}"
                )
            self.verified.add(name)

    def counts(self) -> Verified:
        """How much of the version was verified."""
        size = sum(self._bytes[name] for name in self.verified)
        return Verified(
            tensors=len(self.verified),
            bytes=size,
            unverified_tensors=len(self._bytes) - len(self.verified),
            unverified_bytes=self._all_bytes - size,
        )


def _sum(shard: Shard, elements: torch.Tensor) -> int:
    return int(WeightedSum(shard, elements.device).of(elements)) % 2**64


def _turn(name: str, cycle: int, spread: int) -> int:
    """The version, counted from the first of the `spread` versions of this cycle, that has the tensor's sum."""
    return int.from_bytes(hashlib.blake2b(f"{cycle} {name}".encode(), digest_size=8).digest(), "little") % spread


def _as_integers(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors' bits, 8 bytes at a time where that is possible: they are then compared as fast as memory is read."""
    if all(one.is_contiguous() and one.nbytes % 8 == one.storage_offset() * one.itemsize % 8 == 0 for one in tensors):
        return [one.view(-1).view(torch.int64) for one in tensors]
    return [one.view(INTEGERS[one.itemsize]) for one in tensors]


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

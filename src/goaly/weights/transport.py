"""How a reader reaches a writer rank's ring: chosen for each pair of processes, by where they run.

On one host the ring is mapped (`ring.Ring`): its shards are copied from where the writer put them. From another host
its buckets are read over Monarch's RDMA (`rdma.RemoteReach`), or over TCP where there is no such hardware. Where all
use TorchStore, slots lie there, and neither host matters (`torchstore.StoredRing`, `torchstore.StoredReach`). Where
all go direct, slots lie in the writers' GPUs, and are read over RDMA by the readers' (`rdma.DirectRing`).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from goaly.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.memory import SegmentHandle
from goaly.weights.ring import OnDevice, Ring, Source, Stored

PLACES = {SegmentHandle: "in shared memory", Stored: "in TorchStore", OnDevice: "in its device's memory"}
HANDLES = {"torchstore": Stored, "direct": OnDevice}
"""What a writer rank's slots are reached by under these transports; a segment's handle under all others."""


class Staging(Protocol):
    """One writer rank's slots, as it fills them. Used by one thread at a time, none of them an event loop's."""

    layout: Layout
    buckets: tuple[range, ...]

    def views(self, slot: int) -> list[torch.Tensor]:
        """Where the slot's shards are to be put, bucket by bucket; each bucket is sealed before the next is put."""
        ...

    def unseal(self, slot: int) -> None:
        """Say that the slot holds nothing."""
        ...

    def seal(self, slot: int, bucket: int, version: int) -> None:
        """Say that the bucket holds this version's shards."""
        ...

    def source(self, host: str) -> Source:
        """What readers need to reach it."""
        ...

    def close(self) -> None:
        """Let no further reader in."""
        ...


class Reached(Protocol):
    """One writer rank's ring, as one reader reaches it. Used by one thread at a time, none of them an event loop's."""

    def seals(self, slot: int) -> list[int]:
        """The version whose shards each bucket of the slot holds, or `UNSEALED`."""
        ...

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Bring these buckets within reach of `view`; yields those that are, as they come."""
        ...

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of the slot's shards: holds what the slot does once `fetch` has yielded its bucket, until it goes on."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def crosses(transport: str, reader: str, writer: str) -> bool:
    """Whether a pair of processes on these hosts has to go over the network."""
    if transport == "shm" and reader != writer:
        raise WeightsError(
            "weights.transport=shm: must be auto or rdma, for a reader runs on another host than a trainer rank"
        )
    return transport == "rdma" or reader != writer


def reads_buckets(transport: str, reader: str, writer: str) -> bool:
    """Whether the reader reads whole buckets, rather than what it needs of them."""
    return transport in HANDLES or transport == "rdma" or reader != writer


def needs_remote(source: Source, *, transport: str, host: str) -> bool:
    """Whether a reader on this host can read the source only once its writer has registered it for the network."""
    if not isinstance(source.handle, HANDLES.get(transport, SegmentHandle)):
        raise WeightsError(
            f"weights.transport={transport}: must be the same for readers and trainer ranks; a trainer rank has its "
            f"weights {PLACES[type(source.handle)]}"
        )
    return isinstance(source.handle, SegmentHandle) and crosses(transport, host, source.host)


def stage(
    transport: str, layout: Layout, buckets: tuple[range, ...], slots: int, device: torch.device | None = None
) -> Staging:
    """Slots of this process as a writer rank, whose tensors are on this GPU, if on any."""
    if transport == "torchstore":
        from goaly.weights.torchstore import StoredRing

        return StoredRing(layout, buckets, slots)
    if transport == "direct":
        from goaly.weights.rdma import DirectRing

        return DirectRing(layout, buckets, slots, device or torch.device("cpu"))
    return Ring.create(layout, buckets, slots)


def reach(
    source: Source, wanted: Sequence[int], *, transport: str, host: str, device: torch.device | None = None
) -> Reached:
    """The slots of this writer rank, for a reader on this host that wants these buckets; on this GPU, if on any."""
    if isinstance(source.handle, Stored):
        from goaly.weights.torchstore import StoredReach

        return StoredReach(source)
    direct = isinstance(source.handle, OnDevice)
    if not direct and not needs_remote(source, transport=transport, host=host):
        return Ring.open(source)
    from goaly.weights.rdma import RemoteReach

    return RemoteReach(source, wanted, device if direct else None)

"""How a reader reaches a writer rank's ring: chosen for each pair of processes, by where they run.

On one host the ring is mapped (`ring.Ring`): its shards are copied from where the writer put them. From another host
its buckets are read over Monarch's RDMA (`rdma.RemoteReach`), or over TCP where there is no such hardware.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from goaly.errors import WeightsError
from goaly.weights.ring import Ring, Source


class Reached(Protocol):
    """One writer rank's ring, as one reader reaches it. Used by one thread at a time, none of them an event loop's."""

    def seals(self, slot: int) -> list[int]:
        """The version whose shards each bucket of the slot holds, or `UNSEALED`."""
        ...

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Bring these buckets within reach of `views`; yields those that are, as they come."""
        ...

    def views(self, slot: int) -> list[torch.Tensor]:
        """The slot's shards: what they hold is the slot's once their bucket is fetched, until the next `fetch`."""
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


def reach(source: Source, *, transport: str, host: str) -> Reached:
    """The ring of this writer rank, for a reader on this host."""
    if not crosses(transport, host, source.host):
        return Ring.open(source)
    from goaly.weights.rdma import RemoteReach

    return RemoteReach(source)

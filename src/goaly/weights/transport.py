"""How a writer rank keeps its versions, and how a reader reaches them: chosen for each pair of processes.

| writer and reader | where the slots are | module |
|---|---|---|
| on one host | shared memory, which the reader maps | `shared_memory.py` |
| on different hosts | the same, read over Monarch's RDMA, or TCP without such hardware | `rdma.py` |
| any, with `direct` | the writer's GPU, read over RDMA by the reader's GPU | `rdma.py` |
| any, with `torchstore` | TorchStore | `torchstore.py` |

The last two are imported where they are used: they need Monarch's RDMA and a package that may be absent.
"""

from collections.abc import Sequence

import torch

from goaly.base.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.shared_memory import Ring
from goaly.weights.slots import DEVICE, SHARED, STORED, SlotReader, Slots, Source

PLACES = {"torchstore": STORED, "direct": DEVICE}
"""Where these transports keep slots; all others keep them in shared memory."""


def over_network(transport: str, reader: str, writer: str) -> bool:
    """Whether a reader on one host reaches a writer on the other over the network."""
    if transport == "shm" and reader != writer:
        raise WeightsError(
            "weights.transport=shm: must be auto or rdma, because a reader runs on another host than a trainer rank"
        )
    return transport == "rdma" or reader != writer


def reads_whole_buckets(transport: str, reader: str, writer: str) -> bool:
    """Whether a reader fetches whole buckets, rather than the rectangles that it needs."""
    return transport in PLACES or transport == "rdma" or reader != writer


def needs_remote(source: Source, *, transport: str, host: str) -> bool:
    """Whether a reader on this host can reach the source only once its writer has registered it for the network."""
    if source.place != PLACES.get(transport, SHARED):
        raise WeightsError(
            f"weights.transport={transport}: must be the same for readers and trainer ranks; a trainer rank has its "
            f"weights in {source.place}"
        )
    return source.place == SHARED and over_network(transport, host, source.host)


def slot_writer(
    transport: str, layout: Layout, buckets: tuple[range, ...], slots: int, device: torch.device | None = None
) -> Slots:
    """New slots of this process as a writer rank; `device` is the GPU of its tensors, if any."""
    if transport == "torchstore":
        from goaly.weights.torchstore import StoredSlots

        return StoredSlots(layout, buckets, slots)
    if transport == "direct":
        from goaly.weights.rdma import DeviceSlots

        return DeviceSlots(layout, buckets, slots, device or torch.device("cpu"))
    return Ring.create(layout, buckets, slots)


def slot_reader(
    source: Source, wanted: Sequence[int], *, transport: str, host: str, device: torch.device | None = None
) -> SlotReader:
    """A writer rank's slots for a reader on this host that needs these buckets; `device` is its GPU, if any."""
    if source.place == STORED:
        from goaly.weights.torchstore import StoredReader

        return StoredReader(source)
    if source.place == SHARED and not needs_remote(source, transport=transport, host=host):
        return Ring.open(source)
    from goaly.weights.rdma import RemoteReader

    return RemoteReader(source, wanted, device if source.place == DEVICE else None)

"""How a writer rank keeps its versions, and how a reader reaches them: chosen for each pair of processes.

| writer and reader | where the slots are | module |
|---|---|---|
| on one host | shared memory, which the reader maps | `shared_memory.py` |
| on different hosts | the same, read over Monarch's RDMA, or TCP without such hardware | `rdma.py` |
| any, with `torchstore` | TorchStore | `torchstore.py` |

The last two are imported where they are used: they need Monarch's RDMA and a package that may be absent.
"""

from collections.abc import Sequence

from goaly.base.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.shared_memory import Ring
from goaly.weights.slots import SHARED, STORED, SlotReader, Slots, Source


def reads_whole_buckets(transport: str, reader: str, writer: str) -> bool:
    """Whether a reader on one host fetches whole buckets from a writer on the other, rather than map the slots."""
    return transport != "auto" or reader != writer


def needs_remote(source: Source, *, transport: str, host: str) -> bool:
    """Whether a reader on this host can reach the source only once its writer has registered it for the network."""
    if source.place != (STORED if transport == "torchstore" else SHARED):
        raise WeightsError(
            f"weights.transport={transport}: must be the same for readers and trainer ranks; a trainer rank has its "
            f"weights in {source.place}"
        )
    return source.place == SHARED and reads_whole_buckets(transport, host, source.host)


def slot_writer(transport: str, layout: Layout, buckets: tuple[range, ...], slots: int) -> Slots:
    """New slots of this process as a writer rank."""
    if transport == "torchstore":
        from goaly.weights.torchstore import StoredSlots

        return StoredSlots(layout, buckets, slots)
    return Ring.create(layout, buckets, slots)


def slot_reader(source: Source, wanted: Sequence[int], *, transport: str, host: str) -> SlotReader:
    """A writer rank's slots for a reader on this host that needs these buckets."""
    if source.place == STORED:
        from goaly.weights.torchstore import StoredReader

        return StoredReader(source)
    if not needs_remote(source, transport=transport, host=host):
        return Ring.open(source)
    from goaly.weights.rdma import RemoteReader

    return RemoteReader(source, wanted)

"""How a writer rank keeps its versions, and how a reader reaches them: chosen for each pair of processes.

| writer and reader | where the slots are | module |
|---|---|---|
| on one host | shared memory, which the reader maps | here |
| on different hosts | the same, read over Monarch's RDMA, or TCP without such hardware | `rdma.py` |
| any, with `direct` | the writer's GPU, read over RDMA by the reader's GPU | `rdma.py` |
| any, with `torchstore` | TorchStore | `torchstore.py` |

A slot begins with its seals, one for each bucket of the layout: the version that the bucket holds, or `UNSEALED` while
the writer changes it. Leases keep a slot from being rewritten under a reader; the seals show a reader whose lease was
revoked that its copy may be torn.

Shared memory has no name. The owner makes an anonymous file in memory; readers on the same host open it through the
owner's table of open files. In a process that uses GPUs the memory is registered with them, so that they copy from and
to it directly.

Invariants
    WG-1  A bucket is sealed with a version only while every shard in it is that version's: a slot is unsealed before
          any of it is written.
    WM-1  When no process holds a segment any more, its memory is free. No cleanup has to run for that.
    WM-2  A reader can't write: it maps the segment read-only.
    WM-3  A handle opens the segment that it was made for, or nothing: the file's inode shows a descriptor or process
          id that was used again.
    WM-4  A segment's size is sealed: no reader can crash because the file shrank.
"""

import fcntl
import logging
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from goaly.errors import WeightsError
from goaly.weights.layout import Layout

logger = logging.getLogger(__name__)

UNSEALED = -1
ALIGNMENT = 64
PAGE = 4096
HOST_REGISTER_READ_ONLY = 8
MAP_NOW = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all pages, not each at its first use


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """How a process on the same host maps the slots (`Segment`)."""

    pid: int
    descriptor: int
    inode: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where the slots are in TorchStore (`torchstore.py`)."""

    prefix: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """The slots are in the writer's GPU and are only read over RDMA (`rdma.py`)."""

    bytes: int


Handle = SegmentHandle | Stored | OnDevice
PLACES = {SegmentHandle: "in shared memory", Stored: "in TorchStore", OnDevice: "in its device's memory"}
HANDLES = {"torchstore": Stored, "direct": OnDevice}
"""The handle of a writer rank's slots under these transports; under all others it is a `SegmentHandle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One writer rank as readers see it: which rectangles it stages, and where."""

    layout: Layout
    buckets: tuple[range, ...]
    slots: int
    host: str
    handle: Handle
    remote: Any | None = None
    """The slots as processes on other hosts reach them (`rdma.RemoteSlots`), once a reader there needs them."""
    unreachable: str | None = None
    """Why processes on other hosts can't reach them."""


class SlotReader(Protocol):
    """One writer rank's slots, as one reader reaches them. Used by one thread at a time, never by an event loop's."""

    def seals(self, slot: int) -> list[int]:
        """The version whose shards each bucket of the slot holds, or `UNSEALED`."""
        ...

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """Make these buckets readable through `view`; yields buckets as they arrive."""
        ...

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of the slot's shards. Valid from when `fetch` yields its bucket until `fetch` is resumed."""
        ...


class SlotShape:
    """Where in a slot's memory its seals and shards lie."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...]):
        self._layout = layout
        self._buckets = buckets
        self._seal_bytes = 8 * len(buckets)
        sizes = (_round_up(shard.bytes, ALIGNMENT) for shard in layout)
        self._offsets = [*accumulate(sizes, initial=_round_up(self._seal_bytes, ALIGNMENT))]
        self.bytes = _round_up(max(self._offsets[-1], 1), PAGE)

    def view(self, index: int, memory: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """A shard, in memory that has the slot's bytes from `begin` on."""
        offset, shard = self._offsets[index] - begin, self._layout[index]
        return memory[offset : offset + shard.bytes].view(shard.dtype).view(shard.shape)

    def seals(self, memory: torch.Tensor) -> torch.Tensor:
        """The seals in this slot's memory."""
        return memory[: self._seal_bytes].view(torch.int64)

    def span(self, bucket: int) -> range:
        """Which of the slot's bytes are a bucket's."""
        shards = self._buckets[bucket]
        return range(self._offsets[shards.start], self._offsets[shards.stop])


class Slots:
    """One writer rank's slots in memory of this process. Used by one thread at a time, never by an event loop's."""

    remote: Any | None = None
    """The slots as processes on other hosts reach them (`rdma.RemoteSlots`), once they are registered."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], memory: Sequence[torch.Tensor], handle: Handle):
        """`memory` has the bytes of each slot."""
        self.layout = layout
        self.buckets = buckets
        self.handle = handle
        self._shape = SlotShape(layout, buckets)
        self.count = len(memory)
        """How many slots there are."""
        self._memory = memory
        self._views = [[self._shape.view(index, slot) for index in range(len(layout))] for slot in memory]
        self._seals = [self._shape.seals(slot) for slot in memory]

    def source(self, host: str) -> Source:
        """The description that readers need to reach the slots."""
        return Source(
            layout=self.layout,
            buckets=self.buckets,
            slots=self.count,
            host=host,
            handle=self.handle,
            remote=self.remote,
        )

    def views(self, slot: int) -> list[torch.Tensor]:
        """The slot's shards, each contiguous. A writer seals each bucket before it fills the next."""
        return self._views[slot]

    def view(self, slot: int, shard: int) -> torch.Tensor:
        """One of them."""
        return self._views[slot][shard]

    def unseal(self, slot: int) -> None:
        """Mark all buckets of the slot as holding no version."""
        self._seals[slot].fill_(UNSEALED)

    def seal(self, slot: int, bucket: int, version: int) -> None:
        """Mark the bucket as holding this version's shards."""
        self._seals[slot][bucket] = version

    def seals(self, slot: int) -> list[int]:
        """The version whose shards each bucket of the slot holds, or `UNSEALED`."""
        return self._seals[slot].tolist()

    def stretches(self, slot: int) -> list[torch.Tensor]:
        """The slot's memory as bytes: its seals, then each bucket."""
        if not self.buckets:
            return []
        spans = [self._shape.span(bucket) for bucket in range(len(self.buckets))]
        seals, memory = self._seals[slot], self._memory[slot]
        return [seals.view(torch.uint8), *(memory[span.start : span.stop] for span in spans)]

    def close(self) -> None:
        """Accept no further reader."""
        if self.remote is not None:
            self.remote.drop()


class Segment:
    """Memory that processes on one host share."""

    def __init__(self, handle: SegmentHandle, memory: torch.Tensor, descriptor: int | None):
        self.handle = handle
        self._memory = memory
        self._close_file = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> "Segment":
        """A new writable segment of `size` bytes, with all its pages allocated."""
        size = max(size, 1)
        descriptor = os.memfd_create("goaly-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # WM-4
            mapped = _Mapping(descriptor, size, flags=MAP_NOW)
            handle = SegmentHandle(
                pid=os.getpid(), descriptor=descriptor, inode=os.fstat(descriptor).st_ino, bytes=size
            )
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise WeightsError(f"{size} bytes of shared memory can't be allocated: {error.strerror}") from error
            raise
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        mapped.register(memory.data_ptr(), 0)
        return cls(handle, memory, descriptor)

    @classmethod
    def open(cls, handle: SegmentHandle) -> "Segment":
        """Another process's segment, to read (WM-2)."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(
                f"shared memory of process {handle.pid} can't be opened ({error.strerror}): its owner must be alive, "
                "on this host and of this user"
            ) from error
        try:
            if os.fstat(descriptor).st_ino != handle.inode:  # WM-3
                raise WeightsError(f"shared memory of process {handle.pid} is gone: its owner closed it or died")
            mapped = _Mapping(descriptor, handle.bytes, flags=MAP_NOW, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        mapped.register(memory.data_ptr(), HOST_REGISTER_READ_ONLY)
        return cls(handle, memory, None)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor of this type and shape, `offset` bytes into the segment."""
        elements = torch.Size(shape).numel()
        return self._memory[offset : offset + elements * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Accept no further reader. The memory is freed with the last tensor over it, here and in the readers."""
        if self._close_file is not None:
            self._close_file()


class _Mapping(mmap.mmap):
    """Mapped memory, registered with this process's GPUs, if it has any, for as long as it is mapped."""

    _registered: int | None = None

    def register(self, address: int, flags: int) -> None:
        """Register it with the GPUs. Where that fails, the driver copies through its own memory."""
        if not torch.cuda.is_initialized():
            return
        answer = int(torch.cuda.cudart().cudaHostRegister(address, len(self), flags))
        if answer == 0:
            self._registered = address
        else:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # clears the runtime's error, which would fail the next kernel
            logger.info("%d bytes of shared memory are not registered with the GPU: error %d", len(self), answer)

    def __del__(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)


class Ring(Slots):
    """One writer rank's slots in shared memory, as the writer or a reader on its host sees them."""

    def __init__(self, layout: Layout, buckets: tuple[range, ...], slots: int, segment: Segment):
        size = SlotShape(layout, buckets).bytes
        memory = [segment.tensor(torch.uint8, (size,), slot * size) for slot in range(slots)]
        super().__init__(layout, buckets, memory, segment.handle)
        self._segment = segment

    @classmethod
    def create(cls, layout: Layout, buckets: tuple[range, ...], slots: int) -> "Ring":
        """A new ring of this process as a writer, every slot unsealed."""
        ring = cls(layout, buckets, slots, Segment.create(slots * SlotShape(layout, buckets).bytes))
        for slot in range(slots):
            ring.unseal(slot)
        return ring

    @classmethod
    def open(cls, source: Source) -> "Ring":
        """Another process's ring, to read."""
        assert isinstance(source.handle, SegmentHandle)
        return cls(source.layout, source.buckets, source.slots, Segment.open(source.handle))

    def fetch(self, slot: int, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        """The buckets, at once: the memory is mapped."""
        yield buckets

    def close(self) -> None:
        """Accept no further reader; existing mappings stay."""
        self._segment.close()
        super().close()


def over_network(transport: str, reader: str, writer: str) -> bool:
    """Whether a reader on one host reaches a writer on the other over the network."""
    if transport == "shm" and reader != writer:
        raise WeightsError(
            "weights.transport=shm: must be auto or rdma, because a reader runs on another host than a trainer rank"
        )
    return transport == "rdma" or reader != writer


def reads_whole_buckets(transport: str, reader: str, writer: str) -> bool:
    """Whether a reader fetches whole buckets, rather than the rectangles that it needs."""
    return transport in HANDLES or transport == "rdma" or reader != writer


def needs_remote(source: Source, *, transport: str, host: str) -> bool:
    """Whether a reader on this host can reach the source only once its writer has registered it for the network."""
    if not isinstance(source.handle, HANDLES.get(transport, SegmentHandle)):
        raise WeightsError(
            f"weights.transport={transport}: must be the same for readers and trainer ranks; a trainer rank has its "
            f"weights {PLACES[type(source.handle)]}"
        )
    return isinstance(source.handle, SegmentHandle) and over_network(transport, host, source.host)


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
    if isinstance(source.handle, Stored):
        from goaly.weights.torchstore import StoredReader

        return StoredReader(source)
    direct = isinstance(source.handle, OnDevice)
    if not direct and not needs_remote(source, transport=transport, host=host):
        return Ring.open(source)
    from goaly.weights.rdma import RemoteReader

    return RemoteReader(source, wanted, device if direct else None)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""Slots in shared memory, which readers on the writer's host map.

Shared memory has no name: the owner makes an anonymous file in memory, and readers open it through the owner's table of
open files. When no process holds it any more, the memory is free; no cleanup has to run for that. In a process that
uses GPUs the memory is registered with them, so that they copy from and to it directly.

    weights-5: Readers map a segment read-only, its size is sealed, and a handle opens the segment that it was made for,
        or nothing: the file's inode shows a descriptor or process id that was used again.
"""

import fcntl
import logging
import mmap
import os
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch

from goaly.base.errors import WeightsError
from goaly.weights.layout import Layout
from goaly.weights.slots import SHARED, Slots, SlotShape, Source

logger = logging.getLogger(__name__)

HOST_REGISTER_READ_ONLY = 8
MAP_NOW = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all pages, not each at its first use


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """How a process on the same host maps a segment."""

    pid: int
    descriptor: int
    inode: int
    bytes: int


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
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # weights-5
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
        """Another process's segment, to read (weights-5)."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(
                f"shared memory of process {handle.pid} can't be opened ({error.strerror}): its owner must be alive, "
                "on this host and of this user"
            ) from error
        try:
            if os.fstat(descriptor).st_ino != handle.inode:  # weights-5
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
        super().__init__(layout, buckets, memory, SHARED, segment.handle)
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
        return cls(source.layout, source.buckets, source.slots, Segment.open(source.handle))

    def close(self) -> None:
        """Accept no further reader; existing mappings stay."""
        self._segment.close()
        super().close()

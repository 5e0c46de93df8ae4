"""Shared memory without names: a segment lives as long as a process holds it, however the processes end.

The owner makes an anonymous file in memory; readers on the same host reach it through the owner's table of open
files. There is no name in any folder, so nothing can be left behind (WM-1).

Invariants
    WM-1  When no process holds a segment any more, its memory is free. Nothing needs to run for that.
    WM-2  A reader can't write: it maps the segment read-only.
    WM-3  A handle opens the segment that it was made for, or nothing: a descriptor or process id that was used again
          is noticed by the file's inode.
    WM-4  A segment's size is sealed: no reader can be hit by a file that shrank.

In a process that uses GPUs a segment is registered with them, so that they copy from and to it directly.
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

from goaly.errors import WeightsError

logger = logging.getLogger(__name__)

HOST_REGISTER_READ_ONLY = 8
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """What a process on the same host needs to map a segment."""

    pid: int
    descriptor: int
    inode: int
    bytes: int


class Segment:
    """A stretch of memory that processes on one host share."""

    def __init__(self, handle: SegmentHandle, memory: torch.Tensor, descriptor: int | None):
        self.handle = handle
        self._memory = memory
        self._let_no_one_in = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> "Segment":
        """A new writable segment of `size` bytes, its pages in place."""
        size = max(size, 1)
        descriptor = os.memfd_create("goaly-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # WM-4
            mapped = _Mapping(descriptor, size)
            _populate(mapped, MADV_POPULATE_WRITE)
            handle = SegmentHandle(
                pid=os.getpid(), descriptor=descriptor, inode=os.fstat(descriptor).st_ino, bytes=size
            )
        except BaseException:
            os.close(descriptor)
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
            mapped = _Mapping(descriptor, handle.bytes, prot=mmap.PROT_READ)
            _populate(mapped, MADV_POPULATE_READ)
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        mapped.register(memory.data_ptr(), HOST_REGISTER_READ_ONLY)
        return cls(handle, memory, None)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """The tensor of this type and shape that begins `offset` bytes into the segment."""
        elements = torch.Size(shape).numel()
        return self._memory[offset : offset + elements * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Let no further reader in. The memory is freed with the last tensor over it, here and in the readers."""
        if self._let_no_one_in is not None:
            self._let_no_one_in()


class _Mapping(mmap.mmap):
    """Mapped memory that may be registered with this process's GPUs, for as long as it is mapped."""

    _registered: int | None = None

    def register(self, address: int, flags: int) -> None:
        """Let GPUs reach it, if this process uses any. Where they can't, the driver copies by way of its own memory."""
        if not torch.cuda.is_initialized():
            return
        answer = int(torch.cuda.cudart().cudaHostRegister(address, len(self), flags))
        if answer == 0:
            self._registered = address
        else:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # what the runtime remembers of it would fail the next kernel
            logger.info("%d bytes of shared memory are not registered with the GPU: error %d", len(self), answer)

    def __del__(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)


def _populate(mapped: mmap.mmap, advice: int) -> None:
    """Put all pages in place now; kernels that can't will do so at each page's first use."""
    try:
        mapped.madvise(advice)
    except OSError as error:
        if error.errno != 22:  # EINVAL: before Linux 5.14
            raise WeightsError(f"{len(mapped)} bytes of shared memory can't be had: {error.strerror}") from error

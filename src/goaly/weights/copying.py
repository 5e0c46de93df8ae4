"""Copies of many tensors at once, off the event loop, without holding the interpreter's lock.

Invariants
    WC-1  `run` returns or raises only once no thread and no GPU copies any more, also when its caller is cancelled: the
          memory can be freed then without a late write into it.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")
Pair = tuple[torch.Tensor, torch.Tensor]


class Copier:
    """Threads that copy tensors, for one caller at a time."""

    def __init__(self, threads: int, device: torch.device | None = None):
        """`device` is the GPU that holds some of the tensors, if any."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=_use, initargs=(device,))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do the work in a thread; a cancelled caller still waits for its end (WC-1)."""
        context = contextvars.copy_context()  # Monarch's calls need the actor's context
        done = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(work))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            while not done.done():
                try:
                    await asyncio.wait({done})  # ends with the memory copy
                except asyncio.CancelledError:
                    continue
            done.exception()  # retrieve it: the caller sees the cancellation instead
            raise

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy the second tensor of each pair into the first, casting where the types differ."""
        parts = _parts(pairs, self._threads)
        others = [self._pool.submit(_copied, part) for part in parts[1:]]
        try:
            _copied(parts[0])
        finally:
            for other in others:
                other.exception()  # ends with its copies; WC-1 before anything is raised
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)


def gpu_of(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The GPU that holds some of them, if any."""
    return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)


def _use(device: torch.device | None) -> None:
    """Select this GPU: a new thread begins with the first one."""
    if device is not None:
        torch.cuda.set_device(device)


def _copied(pairs: Sequence[Pair]) -> None:
    """Copy all pairs in one call, which releases the interpreter's lock once instead of once per tensor.

    Targets of a GPU's copies must be contiguous, because the copy ends only after this call.
    """
    if pairs:
        device = next((tensor.device for pair in pairs for tensor in pair if tensor.is_cuda), None)
        with torch.no_grad(), _beside(device):
            torch._foreach_copy_(
                [target for target, _ in pairs], [source for _, source in pairs], non_blocking=device is not None
            )


@contextmanager
def _beside(device: torch.device | None) -> Iterator[None]:
    """Run the block's copies in a stream of their own, after the default stream's work; wait for them at the end."""
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()  # WC-1


def _parts(pairs: Sequence[Pair], count: int) -> list[list[Pair]]:
    """The pairs in `count` parts of about as many bytes each."""
    parts: list[list[Pair]] = [[] for _ in range(count)]
    loads = [0] * count
    for pair in sorted(pairs, key=lambda pair: -pair[0].nbytes) if count > 1 else pairs:
        part = loads.index(min(loads))
        parts[part].append(pair)
        loads[part] += pair[0].nbytes
    return parts

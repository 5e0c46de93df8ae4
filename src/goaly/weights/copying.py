"""Copies of many tensors at once, off the event loop, without holding the interpreter's lock.

Invariants
    WC-1  `run` returns or raises only once no thread copies any more, also when its caller is cancelled: whoever frees
          the memory next can't meet a late write. Nor does a GPU: a copy that it makes is over, too.
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
        """`device` is the GPU that has some of the tensors, if any has."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=_use, initargs=(device,))

    async def run(self, work: Callable[[], Result], *, stop: Callable[[], None] | None = None) -> Result:
        """Do the work in a thread; a cancelled caller asks it to `stop`, and still waits for its end (WC-1)."""
        context = contextvars.copy_context()  # Monarch's calls need the actor's
        done = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(work))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            while not done.done():
                try:
                    await asyncio.wait({done})  # ends with the memory copy
                except asyncio.CancelledError:
                    continue
            done.exception()  # looked at: the cancellation is what the caller sees
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
    """The GPU that has some of them, if any has."""
    return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)


def _use(device: torch.device | None) -> None:
    """A thread begins with the first GPU, whichever its process uses."""
    if device is not None:
        torch.cuda.set_device(device)


def _copied(pairs: Sequence[Pair]) -> None:
    """One call for all: the interpreter's lock is given up once, not per tensor.

    From a GPU, targets have to be contiguous: what it copies is there only at the end.
    """
    if pairs:
        device = next((tensor.device for pair in pairs for tensor in pair if tensor.is_cuda), None)
        with torch.no_grad(), _beside(device):
            torch._foreach_copy_(
                [target for target, _ in pairs], [source for _, source in pairs], non_blocking=device is not None
            )


@contextmanager
def _beside(device: torch.device | None) -> Iterator[None]:
    """Copies of this block run beside a GPU's other work, after its default stream's; they are over at the end."""
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

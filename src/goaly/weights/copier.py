"""A thread that copies tensors, off the event loop and without holding the interpreter's lock.

weights-10: `Copier.run` returns or raises only once no thread and no GPU copies any more, also when its caller is
    cancelled: the memory can then be freed or filled without a late write into it.
"""

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from goaly.base.watchdog import Work, progress

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]


class Copier:
    """A thread that copies tensors, for one caller at a time. torch divides large copies among its own threads."""

    def __init__(self, device: torch.device | None = None):
        """`device` is the GPU that holds some of the tensors, if any."""
        self._device = device
        use = None if device is None else partial(torch.cuda.set_device, device)  # a new thread begins with the first
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=use)

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in the thread; a cancelled caller still waits for its end (weights-10)."""
        context = contextvars.copy_context()  # Monarch's calls need the actor's context

        def watched() -> T:
            with Work("a copy of weights"):
                return work()

        done = asyncio.get_running_loop().run_in_executor(self._pool, context.run, watched)
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
        """Copy the second tensor of each pair into the first, casting where the types differ.

        One call copies them all, which releases the interpreter's lock once instead of once per tensor. A GPU copies in
        a stream of its own, after the default stream's work; its targets must be contiguous, because the copy ends only
        after this call.
        """
        progress()
        if not pairs:
            return
        targets, sources = (list(side) for side in zip(*pairs, strict=True))
        with torch.no_grad():
            if self._device is None:
                torch._foreach_copy_(targets, sources)
                return
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.default_stream(self._device))
            try:
                with torch.cuda.stream(stream):
                    torch._foreach_copy_(targets, sources, non_blocking=True)
            finally:
                stream.synchronize()  # weights-10

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False)

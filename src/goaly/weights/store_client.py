"""The side of a weight store's member that publishers and subscribers share.

A member joins the store once, sends pulses if the store can't watch its process, and copies in threads of its own, off
the event loop and without holding the interpreter's lock. Its background tasks are not vital to its process: when its
pulses fail for good, the store counts the member as ended and refuses its calls; when a writer can't be registered for
other hosts, the store tells the readers that wait for it.

Invariants
    WC-1  `Copier.run` returns or raises only once no thread and no GPU copies any more, also when its caller is
          cancelled: the memory can be freed then without a late write into it.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch

from goaly.liveness import this_process
from goaly.watchdog import Work, progress
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]


class SharedTask(Generic[T]):
    """One run of some work, shared by all callers; after a failure the next caller runs it again."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]):
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """The result. A cancelled caller leaves the work running for the next one."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            self._task = asyncio.create_task(self._work())
        return await asyncio.shield(self._task)

    async def end(self, *, cancel: bool = False) -> None:
        """Wait until the work has ended; `cancel` cancels it first."""
        task, self._task = self._task, None
        if task is not None:
            if cancel:
                task.cancel()
            await asyncio.wait({task})


class BackgroundTasks:
    """Tasks that end with their owner; failures are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this until it ends or `end` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def every(self, seconds: float, call: Callable[[], Awaitable[None]]) -> None:
        """Call this every so many seconds, also after a failure."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await call()
                except Exception as error:
                    logger.warning("%s: %s", type(error).__name__, error)

        self.start(repeat())

    def end(self) -> None:
        """Cancel them all."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: %s", type(error).__name__, error)


class StoreClient:
    """A process's side of its membership in a store, until it is closed; `async with` closes it."""

    def __init__(self, store: WeightStore, settings: WeightSettings, gpu: torch.device | None, host: str | None):
        self._store = store
        self._settings = settings
        self._process = this_process(host)
        self._gpu = gpu
        self._copier = Copier(settings.copy_threads, gpu)
        self._one_at_a_time = asyncio.Lock()
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the store."""
        raise NotImplementedError


class Copier:
    """Threads that copy tensors, for one caller at a time."""

    def __init__(self, threads: int, device: torch.device | None = None):
        """`device` is the GPU that holds some of the tensors, if any."""
        self._threads = threads
        self._device = device
        use = None if device is None else partial(torch.cuda.set_device, device)  # a new thread begins with the first
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=use)

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in a thread; a cancelled caller still waits for its end (WC-1)."""
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
        """Copy the second tensor of each pair into the first, casting where the types differ."""
        progress()
        parts = _parts(pairs, self._threads)
        others = [self._pool.submit(self._copied, part) for part in parts[1:]]
        try:
            self._copied(parts[0])
        finally:
            for other in others:
                other.exception()  # ends with its copies; WC-1 before anything is raised
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)

    def _copied(self, pairs: Sequence[Pair]) -> None:
        """Copy all pairs in one call, which releases the interpreter's lock once instead of once per tensor.

        A GPU copies in a stream of its own, after the default stream's work. The targets of its copies must be
        contiguous, because the copy ends only after this call.
        """
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

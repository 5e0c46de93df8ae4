"""Runs the engine of one rank on its own thread, so that the actor's event loop stays responsive.

Invariants
    RK-1  Only this thread touches the engine; calls run one at a time, in the order they were made.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from goaly.telemetry import spans
from goaly.train.settings import TrainerSettings

if TYPE_CHECKING:
    from goaly.train.engine import ModelEngine

Result = TypeVar("Result")
Engine = TypeVar("Engine", bound="ModelEngine")


class RankThread(Generic[Engine]):
    """Builds an engine on its thread and runs calls there."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)  # RK-1
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, once built."""
        if self._engine is None:
            raise RuntimeError("the engine is not built: call `start` first")
        return self._engine

    @property
    def rank(self) -> int:
        """The rank of this process in its mesh."""
        return int(os.environ.get("RANK", "0"))

    async def build(self, settings: TrainerSettings, make: Callable[[], Engine]) -> None:
        """Join the process group, and build the engine."""
        await self.run(lambda: join(settings.threads, settings.ranks))  # RK-1: on the thread that runs all calls
        self._engine = await self.run(make)

    async def run(self, call: Callable[[], Result], span: str | None = None, **about: int) -> Result:
        """Run `call` on the thread, as a span of this name."""

        def recorded() -> Result:
            with contextlib.nullcontext() if span is None else spans.span(span, **about):
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._executor, recorded)

    def close(self) -> None:
        """Stop the thread after its current call."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def join(threads: int, ranks: int) -> None:
    """Use this process's device and so many threads, and join the process group of so many ranks."""
    import torch
    import torch.distributed as dist

    from goaly.models.spec import use_local_device
    from goaly.train.parallel import backends

    use_local_device()
    torch.set_num_threads(threads)
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(backends())  # the rendezvous address comes from the environment

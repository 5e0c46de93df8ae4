"""Runs the engine of one rank on its own thread, so that the actor's event loop stays responsive.

Only this thread touches the engine; calls run one at a time, in the order they were made. Steps run while another
thread writes a checkpoint; only the copy of the state holds them up. Every call and every write is a piece of work that
the process does not survive if it gets stuck (base-4).
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from goaly.base.telemetry import spans
from goaly.base.watchdog import Work
from goaly.train.settings import TrainerSettings

if TYPE_CHECKING:
    from goaly.train.model_engine import ModelEngine
    from goaly.train.saved_state import StagedState

T = TypeVar("T")
EngineT = TypeVar("EngineT", bound="ModelEngine")


class RankThread(Generic[EngineT]):
    """Builds an engine on its thread and runs calls there."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-checkpoint")
        self._engine: EngineT | None = None
        self._staged: StagedState | None = None
        self._writing: asyncio.Future[None] | None = None

    @property
    def engine(self) -> EngineT:
        """The engine, once built."""
        if self._engine is None:
            raise RuntimeError("the engine is not built: call `start` first")
        return self._engine

    @property
    def rank(self) -> int:
        """The rank of this process in its mesh."""
        return int(os.environ.get("RANK", "0"))

    async def build(
        self, settings: TrainerSettings, make: Callable[[], EngineT], checkpoint: Path | None = None
    ) -> None:
        """Join the process group, and build the engine; with `checkpoint` load its state from that folder."""
        await self.run(lambda: join_process_group(settings.threads, settings.ranks), "join")  # on the thread
        self._engine = await self.run(make, "build")
        if checkpoint is not None:
            from goaly.train.saved_state import load_state

            await self.run(lambda: load_state(self.engine, checkpoint), "load")

    async def go_back(self, checkpoint: Path) -> None:
        """Load the state in this folder, of an earlier version. The number of steps done stays as it is."""
        from goaly.train.saved_state import load_state

        steps_done = self.engine.steps_done
        await self.run(lambda: load_state(self.engine, checkpoint, steps_done=steps_done), "go_back")

    async def run(self, call: Callable[[], T], span: str, **about: int) -> T:
        """Run `call` on the thread, as a span of this name."""

        def recorded() -> T:
            with Work(span), spans.span(span, **about):
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._executor, recorded)

    async def stage(self) -> int:
        """Copy the engine's state to host memory, once the last write has ended; the version of the state."""
        if self._writing is not None:
            await asyncio.wait({self._writing})  # it reads that memory; unblocked by the disk
        return await self.run(self._stage, "stage")

    async def write(self, folder: Path) -> None:
        """Write the staged state of all ranks to this folder, on a thread of its own."""
        staged = self._staged
        assert staged is not None, "stage comes before write"

        def write() -> None:
            with Work("write"), spans.span("write"):
                staged.write(folder)

        self._writing = asyncio.get_running_loop().run_in_executor(self._writer, write)
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody awaits it
        await asyncio.shield(self._writing)

    def close(self) -> None:
        """Stop the threads after their current calls."""
        for executor in (self._executor, self._writer):
            executor.shutdown(wait=False, cancel_futures=True)

    def _stage(self) -> int:
        if self._staged is None:
            from goaly.train.saved_state import StagedState

            self._staged = StagedState(self.engine)
        return self._staged.stage()


def join_process_group(threads: int, ranks: int) -> None:
    """Use this process's device and this number of threads, and join the process group of all ranks."""
    import torch
    import torch.distributed as dist

    from goaly.models.device import use_local_device
    from goaly.train.parallel_model import backends

    use_local_device()
    torch.set_num_threads(threads)
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group(backends())  # the rendezvous address comes from the environment

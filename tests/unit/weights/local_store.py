"""A weight store in this process: the actor's own code without Monarch around it, so that thousands of calls take
a second and every turn of the event loop can be the last of a caller.

Like Monarch's calls: cancelling a caller stops no call, arguments and answers are pickled, and a `broadcast` that fails
would kill the actor (here: is kept in `failures`).
"""

import asyncio
import pickle
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from goaly.base.process import ProcessMark, process_mark
from goaly.weights import store_client
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore


async def within(awaitable: Any) -> Any:
    """The result, which may take half a minute on a busy machine."""
    return await asyncio.wait_for(awaitable, 30)


class LocalStore:
    """Stands in for the mesh of one weight store."""

    def __init__(self, settings: WeightSettings, *, replaces_writers: bool = False):
        self.actor = WeightStore(settings, replaces_writers=replaces_writers)
        self.failures: list[BaseException] = []
        self.calls = 0
        self.under_way: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> "LocalEndpoint":
        return LocalEndpoint(self, name)


class LocalEndpoint:
    """One endpoint of it."""

    def __init__(self, store: LocalStore, name: str):
        self._store = store
        self._method = getattr(WeightStore, name)._method.__wrapped__

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Task[Any]:
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        self._store.calls += 1
        task = asyncio.ensure_future(self._method(self._store.actor, *args, **kwargs))
        self._store.under_way.add(task)
        task.add_done_callback(self._store.under_way.discard)
        return task

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """The answer."""
        task = self._start(args, kwargs)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return pickle.loads(pickle.dumps(await asyncio.shield(task)))

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """No answer."""

        def look(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._store.failures.append(error)

        self._start(args, kwargs).add_done_callback(look)


class Life:
    """A real process, for a member of the store to be: it lives until it is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)  # ends with us
        self.mark: ProcessMark = process_mark(self._process.pid)

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.kill()
        self._process.communicate()


class Gone:
    """What a dead process reaches of the store."""

    def __getattr__(self, name: str) -> "Gone":
        return self

    def broadcast(self, *args: Any) -> None:
        """Nothing is sent."""


@contextmanager
def as_process(mark: Any) -> Iterator[None]:
    """Publishers and subscribers that are made in this block count as another process's."""
    own = store_client.this_process
    store_client.this_process = lambda host=None: mark
    try:
        yield
    finally:
        store_client.this_process = own


@contextmanager
def meshes(world: int) -> Iterator[list[DeviceMesh]]:
    """The one-axis mesh of `world` ranks, as each of them sees it."""
    seen = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        seen.append(init_device_mesh("cpu", (world,)))
        dist.destroy_process_group()
    yield seen


def sharded(mesh: DeviceMesh, dim: int, part: torch.Tensor) -> DTensor:
    """This part, as a rank's part of a tensor that is sharded along `dim`."""
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)

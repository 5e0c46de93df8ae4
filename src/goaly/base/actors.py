"""How goaly's actors declare endpoints, how their callers get answers and how requests are cancelled.

`mesh.spawn(name, SomeActor)` returns a handle of type `SomeActor`; `handle.endpoint.call_one(...)` has the type of that
endpoint's answer. Annotate handles with the actor's class (`queue: TrajectoryQueue`): editors and the type checker then
follow calls into other processes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import ActorError, ProcMesh

from goaly.base.errors import RunFailed, cause_of, portable, root_cause

P = ParamSpec("P")
R = TypeVar("R")
SomeActor = TypeVar("SomeActor")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]:
    """Monarch's `concurrent_endpoint`, which returns `Any`, with the types of Monarch's `endpoint`. It raises what its
    caller can build again: Monarch's pickles of other errors fail there, or are never sent."""
    return monarch.actor.concurrent_endpoint(_portable_errors()(method))


@asynccontextmanager
async def _portable_errors() -> AsyncIterator[None]:
    try:
        yield
    except Exception as error:
        if (sent := portable(error)) is error:
            raise
        raise sent from error


def spawn(mesh: ProcMesh, name: str, actor: Callable[P, SomeActor], *args: P.args, **kwargs: P.kwargs) -> SomeActor:
    """Spawn an actor of this class in each process of the mesh. The type checker sees the constructor's arguments,
    which `ProcMesh.spawn` hides from it."""
    untyped: Callable[..., SomeActor] = mesh.spawn
    return untyped(name, actor, *args, **kwargs)


async def answer_of(call: Awaitable[R]) -> R:
    """The answer of an actor. An error of its endpoint is raised unchanged, not as Monarch's report of it."""
    try:
        return await call
    except ActorError as error:
        raise root_cause(error) from error


async def ask(endpoint: str, call: Awaitable[R]) -> R:
    """The answer of an actor. A failure is raised as a RunFailed that names the actor, the endpoint and the cause."""
    try:
        return await call
    except (SupervisionError, ActorError) as error:
        raise named(endpoint, error) from error


def named(endpoint: str, error: BaseException) -> BaseException:
    """An actor's failure as a RunFailed that names the actor, the endpoint and the cause; other errors as they are."""
    if isinstance(error, SupervisionError):
        failed = RunFailed(f"{endpoint.partition('.')[0]} died during {endpoint}: {error}")
    elif isinstance(error, ActorError):
        failed = RunFailed(f"{endpoint} failed: {cause_of(error)}")
    else:
        return error
    failed.__cause__ = error
    return failed


@asynccontextmanager
async def running(work: Awaitable[R]) -> AsyncIterator[asyncio.Future[R]]:
    """The work, which runs while the block does. At the block's end it is cancelled if it is not done."""
    future = asyncio.ensure_future(work)
    try:
        yield future
    finally:
        future.cancel()  # no effect once it is done
        await asyncio.wait((future,))  # a cancelled call ends at once
        if not future.cancelled():
            future.exception()  # retrieve it: nobody else may


async def unless(event: asyncio.Event, work: Awaitable[R]) -> asyncio.Future[R] | None:
    """The work once it is done, or None if the event comes first; the work is cancelled then."""
    async with running(work) as working, running(event.wait()) as waiting:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None


class NamedTasks:
    """The tasks behind an actor's requests, which another endpoint can cancel by name: Monarch does not tell an actor
    that the caller of an endpoint was cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[int | str, asyncio.Task[Any]] = {}

    async def run(self, name: int | str, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run the work as a task, and return the task once it has ended: done, failed or cancelled."""
        task = self._tasks[name] = asyncio.create_task(work, name=f"request {name}")
        try:
            await asyncio.wait([task])  # Unblocked by the end of the work, or by `cancel`.
        finally:
            if self._tasks.get(name) is task:  # not that of a newer request of this name
                del self._tasks[name]
            task.cancel()  # if the endpoint itself is cancelled; does nothing to a task that has ended
        return task

    async def cancel(self, names: Iterable[int | str] | None = None) -> None:
        """Cancel these tasks, or all, and return when they have ended. Unknown names are ignored."""
        tasks = [self._tasks[name] for name in (self._tasks if names is None else names) if name in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # Unblocked by the clean-up of the tasks.

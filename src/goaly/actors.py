"""How goaly's actors declare endpoints and how their callers get answers, on top of Monarch.

`mesh.spawn(name, SomeActor)` returns a handle of type `SomeActor`; `handle.endpoint.call_one(...)` has the type of that
endpoint's answer. Annotate handles with the actor's class (`queue: TrajectoryQueue`): editors and the type checker then
follow calls into other processes.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import ActorError

from goaly.errors import RunFailed, cause_of, root_cause

__all__ = ["SupervisionError", "answer_of", "ask", "concurrent_endpoint"]

P = ParamSpec("P")
R = TypeVar("R")


def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> EndpointProperty[P, R]:
    """Monarch's `concurrent_endpoint`, which returns `Any`, with the types of Monarch's `endpoint`."""
    return monarch.actor.concurrent_endpoint(method)


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
    except SupervisionError as error:
        raise RunFailed(f"{endpoint.partition('.')[0]} died during {endpoint}: {error}") from error
    except ActorError as error:
        raise RunFailed(f"{endpoint} failed: {cause_of(error)}") from error

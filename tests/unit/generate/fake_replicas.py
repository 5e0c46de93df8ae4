"""Replicas that answer, hang, fail and die on command, and routers that know them. Handles arrive pickled, as from an
actor."""

import asyncio
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from goaly.base.errors import ReplicaLost
from goaly.generate.connection import Quarantine
from goaly.generate.request import Sampling
from goaly.generate.router import Router
from goaly.generate.streamed_answer import OnPart

SAMPLING = Sampling(max_tokens=4)
POISON = "poison"


@dataclass
class Handle:
    """What travels to a router: another object each time."""

    name: str


@dataclass
class Stream:
    """A streamed request: the test gives its parts, and its end."""

    prompt: list[int]
    sampling: Sampling
    on_part: OnPart
    written: int
    future: asyncio.Future[Any]


@dataclass
class Replica:
    """A replica: answers with its own name; holds requests while `gate` is closed; dies of poison."""

    name: str
    seen: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    quarantine: Quarantine = field(default_factory=Quarantine)
    error: Exception | None = None
    connections: list["FakeConnection"] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)
    begun_at: list[int | None] = field(default_factory=list)
    alive: bool = True

    def __post_init__(self) -> None:
        self.gate.set()

    def die(self) -> None:
        self.alive = False
        for connection in self.connections:
            connection.break_()


class FakeConnection:
    """One router's connection to a replica."""

    def __init__(self, replica: Replica):
        self.replica = replica
        self.closed = False
        self.under_way: dict[str, asyncio.Future[Any]] = {}
        replica.connections.append(self)

    def wait_turn(self, request_id: str) -> asyncio.Future[None]:
        future = self._expect(request_id)
        if self.replica.alive:
            self.replica.quarantine.enter(request_id, lambda: future.done() or future.set_result(None))
        return future

    def submit(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        min_version: int,
        on_part: OnPart | None = None,
        written: int = 0,
        begun_at: int | None = None,
    ) -> asyncio.Future[Any]:
        future = self._expect(request_id)
        self.replica.seen.append(request_id)
        self.replica.begun_at.append(begun_at)
        if on_part is not None:
            self.replica.streams[request_id] = Stream(tokens, sampling, on_part, written, future)
            return future
        if request_id.startswith(POISON):
            asyncio.get_running_loop().call_soon(self.replica.die)
        else:
            future.answering = asyncio.ensure_future(self._answer(request_id, future))  # type: ignore[missing-attribute]
        return future

    def cancel(self, request_id: str) -> None:
        self.replica.cancelled.append(request_id)
        self.replica.quarantine.leave(request_id)

    def close(self) -> None:
        self.closed = True
        self._end(None)

    def break_(self) -> None:
        self._end(ReplicaLost("its process died"))

    def _end(self, error: Exception | None) -> None:
        for future in self.under_way.values():
            if not future.done():
                future.cancel() if error is None else future.set_exception(error)

    def _expect(self, request_id: str) -> asyncio.Future[Any]:
        future = self.under_way[request_id] = asyncio.get_running_loop().create_future()
        if not self.replica.alive:
            future.set_exception(ReplicaLost("its process died"))
        return future

    async def _answer(self, request_id: str, future: asyncio.Future[str]) -> None:
        await self.replica.gate.wait()
        if not self.replica.alive or future.done():
            return
        self.replica.quarantine.leave(request_id)
        if self.replica.error is not None:
            future.set_exception(self.replica.error)
        else:
            future.set_result(self.replica.name)


class Fleet:
    """Replicas by name, and routers that know them by what they are told."""

    def __init__(self, *names: str) -> None:
        self.replicas = {name: Replica(name) for name in names}

    def __getitem__(self, name: str) -> Replica:
        return self.replicas.setdefault(name, Replica(name))

    def router(self, *, first: int = 0) -> Router:
        return Router(lambda handle: FakeConnection(self[handle.name]), first=first)  # type: ignore[bad-argument-type]


def announce(router: Router, names: Iterable[str]) -> None:
    router.update(pickle.loads(pickle.dumps({name: Handle(name) for name in names})))


def one_and_two() -> tuple[Router, Replica, Replica]:
    fleet = Fleet("one", "two")
    return fleet.router(), fleet["one"], fleet["two"]


async def ask(router: Router, request_id: str = "r", session: str | None = None) -> Any:
    return await router.generate(request_id, [1], SAMPLING, 0, session)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)

"""Connections and a router between processes: real actors and pickled handles, without an engine."""

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint
from spawned import spawn

from goaly.base.errors import ReplicaLost
from goaly.generate.connection import (
    Clients,
    Connection,
    Isolate,
    Leave,
    Submit,
    ToReplica,
    Ways,
    Withdraw,
    client_of,
    own_name,
)
from goaly.generate.request import Finish, Request, Sample, Sampling
from goaly.generate.router import Router

pytestmark = pytest.mark.timeout(60)

SAMPLING = Sampling(max_tokens=4)
HELD = 99
"""The version that never comes: such requests keep running."""


class Echo(Actor):
    """Answers a request with its prompt, and an empty one with an error; counts messages."""

    def __init__(self, takes_sockets: bool = True) -> None:
        self._clients = Clients(self._told)
        self._takes_sockets = takes_sockets
        self._messages: list[list[str]] = []
        self._names: list[str] = []
        self._held: list[str] = []
        self._cancelled: list[str] = []
        self._connected = 0
        self._broken = asyncio.Event()
        self._changed = asyncio.Event()

    @concurrent_endpoint
    async def connect(self, client: str, ways: Ways) -> None:
        self._connected += 1
        await self._clients.serve(
            client, ways if self._takes_sockets else replace(ways, socket="\0nobody"), self._broken
        )
        raise OSError("no route to host")

    @concurrent_endpoint
    async def tell(self, client: str, message: ToReplica) -> None:
        assert not self._takes_sockets
        self._told(client, message)

    def _told(self, client: str, message: ToReplica) -> None:
        match message:
            case Submit(requests):
                self._submit(client, requests)
            case Isolate(request_id):
                self._clients.send(client, [(request_id, None)])
            case Withdraw(request_ids):
                self._cancel(request_ids)
            case Leave():
                self._clients.disconnect(client)
                self._cancel([name for name in self._held if client_of(name) == client])
        self._wake()

    def _submit(self, client: str, requests: list[Request]) -> None:
        self._messages.append([own_name(request.request_id) for request in requests])
        self._names += [request.request_id for request in requests]
        for request in requests:
            tokens = torch.tensor(request.prompt)
            versions = (tokens + (request.begun_at or 0)).int()
            result = Sample(tokens=tokens, logprobs=-tokens.float(), versions=versions, finish=Finish.STOP)
            if request.min_version < HELD:
                answer = result if request.prompt else ValueError("nothing to continue")
                self._clients.send(client, [(request.request_id, answer)])
            else:
                self._held.append(request.request_id)

    def _cancel(self, request_ids: list[str]) -> None:
        self._cancelled += map(own_name, request_ids)
        self._held = [name for name in self._held if name not in request_ids]

    @concurrent_endpoint
    async def seen(self) -> tuple[list[list[str]], list[str]]:
        return self._messages, self._cancelled

    @concurrent_endpoint
    async def names(self) -> list[str]:
        return self._names

    @concurrent_endpoint
    async def when(self, messages: int, cancelled: int) -> tuple[list[list[str]], list[str], int]:
        """Once there were so many messages and cancelled requests: both, and how many sockets there were."""
        while len(self._messages) < messages or len(self._cancelled) < cancelled:
            await self._changed.wait()
        return self._messages, self._cancelled, self._connected

    @concurrent_endpoint
    async def break_sockets(self) -> None:
        broken, self._broken = self._broken, asyncio.Event()
        broken.set()

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Client(Actor):
    """A process that samples: it has a router, and hears of replicas as a rollout worker does."""

    def __init__(self) -> None:
        self._router = Router()
        self._asking: dict[str, asyncio.Task[Sample]] = {}

    @concurrent_endpoint
    async def replicas(self, handles: Mapping[str, Any]) -> None:
        self._router.update(handles)

    @concurrent_endpoint
    async def ask(self, request_id: str, min_version: int) -> None:
        self._asking[request_id] = asyncio.create_task(self._router.generate(request_id, [3, 4], SAMPLING, min_version))

    @concurrent_endpoint
    async def answer(self, request_id: str) -> list[int]:
        return (await self._asking.pop(request_id)).tokens.tolist()

    @concurrent_endpoint
    async def give_up(self, request_id: str) -> None:
        self._asking.pop(request_id).cancel()


@pytest.mark.parametrize("takes_sockets", [True, False], ids=["on a socket", "by calls"])
async def test_requests_of_one_moment_travel_together_and_each_has_its_own_end(takes_sockets: bool):
    mesh = spawn("rollout")
    replica = mesh.spawn("echo", Echo, takes_sockets)
    connection = Connection(replica)

    together = [connection.submit(str(n), [n, n + 1], SAMPLING) for n in range(50)]
    broken = connection.submit("broken", [], SAMPLING)
    withdrawn = connection.submit("withdrawn at once", [1], SAMPLING)
    connection.cancel("withdrawn at once")
    held = connection.submit("held", [1], SAMPLING, HELD)
    samples = await asyncio.gather(*together)
    assert [sample.tokens.tolist() for sample in samples] == [[n, n + 1] for n in range(50)]
    with pytest.raises(ValueError, match="nothing to continue"):
        await broken
    assert withdrawn.cancelled()
    connection.cancel("held")
    assert held.cancelled()

    fine = connection.submit("fine", [5], SAMPLING)
    stays: Any = threading.Lock()
    stuck = connection.submit("stuck", [5], Sampling(max_tokens=4, logit_bias={7: stays}))
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        await asyncio.wait_for(stuck, 30)
    assert (await asyncio.wait_for(fine, 30)).tokens.tolist() == [5]  # generate-1
    messages, cancelled = await replica.seen.call_one()
    assert messages == [[*map(str, range(50)), "broken", "held"], ["fine"]]  # generate-2
    assert cancelled == ["held"]  # generate-2

    other = Connection(replica)
    sample = await other.submit("0", [7], SAMPLING, begun_at=3)
    assert (sample.tokens.tolist(), sample.versions.tolist()) == ([7], [10])  # generate-4
    names = await replica.names.call_one()
    assert len(set(names)) == len(names)  # "0" came from both
    hung_up = other.submit("1", [7], SAMPLING, HELD)
    await replica.when.call_one(4, 0)
    left_behind = other.submit("2", [7], SAMPLING)
    other.close()
    assert hung_up.cancelled()
    assert left_behind.cancelled()
    with pytest.raises(ReplicaLost):
        await other.submit("3", [7], SAMPLING)

    orphaned = connection.submit("orphaned", [1], SAMPLING, HELD)
    messages, cancelled, _ = await replica.when.call_one(5, 2)
    assert messages[2:] == [["0"], ["1"], ["orphaned"]]  # "2" never left
    assert cancelled == ["held", "1"]  # generate-2
    await mesh.stop()
    with pytest.raises(ReplicaLost):  # generate-1
        await asyncio.wait_for(orphaned, 30)
    with pytest.raises(ReplicaLost):
        await connection.submit("too late", [1], SAMPLING)
    connection.close()


async def test_a_router_knows_replicas_by_name_and_moves_requests_whichever_way_a_replica_goes():
    """Handles arrive pickled, so that no two are the same object."""
    meshes = [spawn("rollout") for _ in range(2)]
    client, one = (meshes[0].spawn(name, kind) for name, kind in (("client", Client), ("one", Echo)))
    two = meshes[1].spawn("two", Echo)
    await client.replicas.call_one({"one": one, "two": two})
    for request_id in ("first", "second"):
        await client.ask.call_one(request_id, HELD)
    for replica, request_id in ((one, "first"), (two, "second")):
        assert (await replica.when.call_one(1, 0))[0] == [[request_id]]

    await client.replicas.call_one({"one": one, "two": two})
    await client.ask.call_one("quick", 0)
    assert await client.answer.call_one("quick") == [3, 4]
    assert await one.when.call_one(2, 0) == ([["first"], ["quick"]], [], 1)
    assert await two.when.call_one(1, 0) == ([["second"]], [], 1)

    await client.replicas.call_one({"two": two})  # the first one lives: it must not go on for nobody
    assert await one.when.call_one(2, 1) == ([["first"], ["quick"]], ["first"], 1)
    assert (await two.when.call_one(2, 0))[0] == [["second"], ["first.1"]]  # generate-10

    await client.replicas.call_one({"one": one, "two": two})
    os.kill(await two.pid.call_one(), signal.SIGKILL)
    await client.replicas.call_one({"one": one})
    messages, _, connections = await one.when.call_one(4, 1)
    # generate-10; "first.2" asked for its turn
    assert (sorted(messages[2:]), connections) == ([["first.2"], ["second.1"]], 2)
    for request_id in ("first", "second"):
        await client.give_up.call_one(request_id)
    assert sorted((await one.when.call_one(4, 3))[1][1:]) == ["first.2", "second.1"]
    await meshes[0].stop()


async def test_a_socket_that_breaks_while_its_replica_lives_opens_again_and_its_requests_go_on():
    mesh = spawn("rollout")
    client, replica = mesh.spawn("client", Client), mesh.spawn("echo", Echo)
    await client.replicas.call_one({"only": replica})
    await client.ask.call_one("held", HELD)
    await replica.when.call_one(1, 0)
    await replica.break_sockets.call_one()
    assert await replica.when.call_one(2, 1) == ([["held"], ["held.1"]], ["held"], 2)  # generate-2
    await client.ask.call_one("quick", 0)
    assert await client.answer.call_one("quick") == [3, 4]
    await client.give_up.call_one("held")
    await mesh.stop()

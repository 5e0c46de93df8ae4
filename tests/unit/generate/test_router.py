"""The router against replicas that answer, hang, fail and die on command. Handles arrive pickled, as from an actor."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from goaly.errors import PoisonRequest, ReplicaLost
from goaly.generate import router as routing
from goaly.generate.connection import POISON_DEATHS, Quarantine
from goaly.generate.request import Sampling
from goaly.generate.router import Router

SAMPLING = Sampling(max_tokens=4)
POISON = "poison"


@dataclass
class Handle:
    """What travels to a router: another object each time."""

    name: str


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

    def submit(self, request_id: str, tokens: list[int], sampling: Sampling, min_version: int) -> asyncio.Future[str]:
        future = self._expect(request_id)
        self.replica.seen.append(request_id)
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


async def test_requests_go_to_the_least_loaded_replica() -> None:
    router, one, two = one_and_two()
    announce(router, ["one", "two"])
    one.gate.clear()
    two.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"r{i}")) for i in range(4)]
    await settled()
    assert (len(one.seen), len(two.seen)) == (2, 2)
    one.gate.set()
    assert await tasks[0] == "one"
    await settled()
    tasks += [asyncio.create_task(ask(router, f"s{i}")) for i in range(2)]
    await settled()
    assert (len(one.seen), len(two.seen)) == (4, 2)
    two.gate.set()
    await asyncio.gather(*tasks)


async def test_sessions_of_many_routers_come_out_even_over_equal_replicas() -> None:
    """RO-6"""
    fleet = Fleet("a", "b", "c", "d")
    for replica in fleet.replicas.values():
        replica.gate.clear()
    tasks = []
    for first in range(16):
        router = fleet.router(first=first)
        announce(router, fleet.replicas)
        for session in ("x", "y"):
            tasks += [asyncio.create_task(ask(router, f"{first} {session} {n}", session)) for n in range(8)]
    await settled()
    assert [len(replica.seen) for replica in fleet.replicas.values()] == [64] * 4
    for replica in fleet.replicas.values():
        replica.gate.set()
    await asyncio.gather(*tasks)


async def test_replicas_with_the_same_load_take_turns() -> None:
    """RO-6"""
    router = (fleet := Fleet("a", "b", "c")).router(first=1)
    announce(router, fleet.replicas)
    assert [await ask(router, f"r{i}") for i in range(6)] == ["b", "c", "a", "b", "c", "a"]


async def test_a_session_stays_with_its_replica_even_when_that_is_busier() -> None:
    router, one, two = one_and_two()
    announce(router, ["one", "two"])
    first = await ask(router, "a", session="s")
    busy = one if first == "one" else two
    busy.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"b{i}", session="s")) for i in range(3)]
    await settled()
    assert len(busy.seen) == 4
    busy.gate.set()
    assert set(await asyncio.gather(*tasks)) == {busy.name}


async def test_requests_of_a_lost_replica_finish_elsewhere_without_their_caller_noticing() -> None:
    router, one, two = one_and_two()
    one.gate.clear()
    announce(router, ["one"])
    tasks = [asyncio.create_task(ask(router, f"r{i}")) for i in range(3)]
    await settled()
    assert len(one.seen) == 3
    announce(router, ["two"])  # RO-1
    assert await asyncio.gather(*tasks) == ["two"] * 3
    assert one.connections[0].closed  # RO-3: `Connection.close` cancels them there
    assert len(two.seen) == 3


async def test_requests_move_at_once_when_their_connection_breaks_before_the_death_is_announced() -> None:
    router, one, two = one_and_two()
    announce(router, ["one"])
    one.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"r{i}")) for i in range(3)]
    await settled()
    one.die()
    await settled()
    assert one.connections[0].closed
    assert not any(task.done() for task in tasks)  # RO-2
    announce(router, ["two"])
    assert await asyncio.gather(*tasks) == ["two"] * 3  # RO-1
    assert two.seen == ["r0.1", "r1.1", "r2.1"]


async def test_a_connection_to_a_living_replica_opens_again_and_nobody_has_to_announce_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RO-7"""
    monkeypatch.setattr(routing, "REOPEN_SECONDS", 0.0)
    router, one, _ = one_and_two()
    announce(router, ["one"])
    one.gate.clear()
    task = asyncio.create_task(ask(router, session="s"))
    for breaks in range(3):
        await settled()
        assert len(one.connections) == breaks + 1
        one.connections[-1].break_()
    await settled()
    one.gate.set()
    assert await task == "one"
    assert one.seen == ["r", "r.1", "r.2", "r.3"]
    announce(router, ["two"])
    await settled()
    assert [connection.closed for connection in one.connections] == [True] * 4
    assert await ask(router, session="s") == "two"


async def test_a_connection_stays_broken_once_its_replica_is_announced_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """RO-7"""
    monkeypatch.setattr(routing, "REOPEN_SECONDS", 0.0)
    router, one, _ = one_and_two()
    announce(router, ["one", "two"])
    one.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"r{n}")) for n in range(2)]
    await settled()
    one.die()
    await asyncio.sleep(0)  # the request hears of it
    announce(router, ["two"])
    assert await asyncio.gather(*tasks) == ["two"] * 2
    await settled()
    assert len(one.connections) == 1


async def test_a_connection_that_breaks_again_and_again_without_a_sample_ends_the_process_and_a_sample_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RO-7"""
    monkeypatch.setattr(routing, "REOPEN_SECONDS", 0.0)
    reasons = list[str]()
    monkeypatch.setattr(routing, "give_up", lambda why, error: reasons.append(f"{why}: {error}"))
    router, one, _ = one_and_two()
    announce(router, ["one"])
    for _ in range(2):
        one.gate.clear()
        task = asyncio.create_task(ask(router))
        for _ in range(routing.MOST_BREAKS - 1):
            await settled()
            one.connections[-1].break_()
        await settled()
        one.gate.set()
        assert await task == "one"
        assert reasons == []
    one.gate.clear()
    task = asyncio.create_task(ask(router))
    for _ in range(routing.MOST_BREAKS):
        await settled()
        one.connections[-1].break_()
    await settled()
    assert reasons == [f"the connection to one broke {routing.MOST_BREAKS} times in a row: its process died"]
    task.cancel()


async def test_an_announcement_of_the_same_names_keeps_the_lines_and_asks_nothing_again() -> None:
    """RO-5"""
    router, one, two = one_and_two()
    announce(router, ["one"])
    one.gate.clear()
    task = asyncio.create_task(ask(router))
    await settled()
    announce(router, ["one"])
    announce(router, ["two", "one"])
    await settled()
    assert (len(one.connections), one.connections[0].closed, one.seen, two.seen) == (1, False, ["r"], [])
    one.gate.set()
    assert await task == "one"


async def test_a_replacement_has_another_name_and_gets_a_connection_of_its_own() -> None:
    fleet = Fleet()
    router = fleet.router()
    announce(router, ["generator-0"])
    fleet["generator-0"].gate.clear()
    task = asyncio.create_task(ask(router))
    await settled()
    announce(router, ["generator-0-1"])
    assert await task == "generator-0-1"
    assert fleet["generator-0"].connections[0].closed


async def test_with_no_replica_requests_wait_for_one() -> None:
    router, one, _ = one_and_two()
    task = asyncio.create_task(ask(router))
    await settled()
    assert not task.done()  # RO-2
    announce(router, ["one"])
    assert await task == "one"
    announce(router, [])
    task = asyncio.create_task(ask(router))
    await settled()
    assert not task.done()
    announce(router, ["one"])
    assert await task == "one"
    assert len(one.connections) == 2


async def test_a_cancelled_request_is_cancelled_at_its_replica() -> None:
    router, one, _ = one_and_two()
    one.gate.clear()
    announce(router, ["one"])
    task = asyncio.create_task(ask(router, "mine"))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.cancelled == ["mine"]  # RO-3


async def test_a_caller_cancelled_as_its_replica_dies_is_cancelled_not_retried() -> None:
    router, one, two = one_and_two()
    one.gate.clear()
    announce(router, ["one"])
    task = asyncio.create_task(ask(router))
    await settled()
    task.cancel()
    announce(router, ["two"])
    with pytest.raises(asyncio.CancelledError):
        await task
    assert two.seen == []


async def test_an_application_error_reaches_the_caller_and_is_not_retried() -> None:
    router, one, two = one_and_two()
    one.error = two.error = ValueError("bad request")
    announce(router, ["one", "two"])
    with pytest.raises(ValueError, match="bad request"):
        await ask(router)
    assert len(one.seen) + len(two.seen) == 1  # RO-4


@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_request_that_kills_replicas_fails_alone_and_all_the_others_get_their_sample(
    replicas: int, routers: int
) -> None:
    """RO-1, with several routers whose requests are all beside the poison each time."""
    fleet = Fleet()
    serving = [f"replica {n}" for n in range(replicas)]
    all_routers = [fleet.router(first=n) for n in range(routers)]

    def tell() -> None:
        for router in all_routers:
            announce(router, serving)

    tell()
    for name in serving:
        fleet[name].gate.clear()
    poison = asyncio.create_task(ask(all_routers[0], POISON))
    others = [asyncio.create_task(ask(router, f"r{n} {i}")) for n, router in enumerate(all_routers) for i in range(6)]
    deaths = 0
    while not poison.done():
        await settled()
        for name in [name for name in serving if not fleet[name].alive]:
            serving[serving.index(name)] = replacement = f"replica {replicas + deaths}"
            deaths += 1
            fleet[replacement].gate.clear()
            tell()
        if deaths >= 2:  # now they wait for each other's end
            for name in serving:
                fleet[name].gate.set()
    with pytest.raises(PoisonRequest, match=r"request poison was running at 3 generator replicas"):
        await poison
    assert sum(not replica.alive for replica in fleet.replicas.values()) == POISON_DEATHS
    serving = [name for name in serving if fleet[name].alive] or ["replica at last"]
    tell()
    for name in serving:
        fleet[name].gate.set()
    assert len(await asyncio.wait_for(asyncio.gather(*others), 10)) == 6 * routers


async def test_suspects_are_under_way_one_at_a_time_and_only_then_does_a_death_count_for_them() -> None:
    fleet = Fleet()
    routers = [fleet.router() for _ in range(2)]
    fleet["c"].gate.clear()
    fleet["d"].gate.clear()
    for name in "ab":
        fleet[name].gate.clear()
    tasks = [asyncio.create_task(ask(routers[n % 2], f"r{n}")) for n in range(4)]
    for name in "abc":
        for router in routers:
            announce(router, [name])
        await settled()
        if name == "c":
            assert fleet["c"].seen == ["r0.2"]  # the others wait for their turn
            tasks.append(asyncio.create_task(ask(routers[0], "fresh")))
            await settled()
            assert fleet["c"].seen == ["r0.2", "fresh"]  # who is no suspect does not
        fleet[name].die()
        await settled()
    with pytest.raises(PoisonRequest):
        await tasks[0]
    for router in routers:
        announce(router, ["d"])
    await settled()
    assert len(fleet["d"].seen) == 2
    assert "fresh.1" in fleet["d"].seen
    fleet["d"].gate.set()
    assert await asyncio.gather(*tasks[1:]) == ["d"] * 4


async def test_a_suspect_whose_caller_gives_up_makes_room_for_the_next() -> None:
    fleet = Fleet()
    router = fleet.router()
    tasks = [asyncio.create_task(ask(router, f"r{n}")) for n in range(3)]
    for name in "abc":
        fleet[name].gate.clear()
        announce(router, [name])
        await settled()
        if name != "c":
            fleet[name].die()
            await settled()
    assert fleet["c"].seen == ["r0.2"]
    tasks[1].cancel()  # it waits for its turn
    tasks[0].cancel()
    await settled()
    assert fleet["c"].seen == ["r0.2", "r2.2"]
    fleet["c"].gate.set()
    assert await tasks[2] == "c"


def test_a_quarantine_lets_one_begin_after_the_other_left_in_order() -> None:
    quarantine, begun = Quarantine(), list[str]()
    for name in "abcd":
        quarantine.enter(name, lambda name=name: begun.append(name))
    assert begun == ["a"]
    quarantine.leave("c")
    quarantine.leave("nobody")
    assert begun == ["a"]
    quarantine.leave("a")
    assert begun == ["a", "b"]
    quarantine.leave("b")
    quarantine.leave("d")
    quarantine.enter("e", lambda: begun.append("e"))
    assert Counter(begun) == Counter("abde")

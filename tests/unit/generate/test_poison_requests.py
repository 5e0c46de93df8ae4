"""Requests that kill their replicas, and the suspects beside them."""

import asyncio
from collections import Counter

import pytest

from goaly.base.errors import PoisonRequest
from goaly.generate.connection import POISON_DEATHS, Quarantine
from tests.unit.generate.fake_replicas import POISON, Fleet, announce, ask, settled


@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_request_that_kills_replicas_fails_alone_and_all_the_others_get_their_sample(
    replicas: int, routers: int
) -> None:
    """generate-10, with several routers whose requests are all beside the poison each time."""
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

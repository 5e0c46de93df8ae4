"""The router: where requests go, and where they go on when a replica or a connection is lost."""

import asyncio
from typing import Any

import pytest

from goaly.base.errors import AnswerBroken
from goaly.generate import router as routing
from goaly.generate.request import Finish, Sample, Sampling, seed_of
from goaly.generate.versioned_tokens import VersionedTokens
from tests.unit.generate.fake_replicas import Fleet, announce, ask, one_and_two, settled


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
    router = (fleet := Fleet("a", "b", "c")).router(first=1)
    announce(router, fleet.replicas)
    assert [await ask(router, f"r{i}") for i in range(6)] == ["b", "c", "a", "b", "c", "a"]


async def test_a_replica_is_told_when_a_requests_conversation_began() -> None:  # generate-4
    router, one, _ = one_and_two()
    announce(router, ["one"])
    await router.generate("r", [1], Sampling(), 0, None, None, 7)
    await ask(router, "other")
    assert one.begun_at == [7, None]


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
    announce(router, ["two"])  # generate-10
    assert await asyncio.gather(*tasks) == ["two"] * 3
    assert one.connections[0].closed  # `Connection.close` cancels them there
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
    assert not any(task.done() for task in tasks)
    announce(router, ["two"])
    assert await asyncio.gather(*tasks) == ["two"] * 3  # generate-10
    assert two.seen == ["r0.1", "r1.1", "r2.1"]


async def test_a_connection_to_a_living_replica_opens_again_and_nobody_has_to_announce_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_with_no_replica_requests_wait_for_one() -> None:
    router, one, _ = one_and_two()
    task = asyncio.create_task(ask(router))
    await settled()
    assert not task.done()
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
    assert one.cancelled == ["mine"]


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
    assert len(one.seen) + len(two.seen) == 1


async def test_a_streamed_answer_goes_on_at_another_replica_after_the_tokens_that_its_caller_has() -> None:
    """generate-12"""
    router, one, two = one_and_two()
    announce(router, ["one"])
    parts: list[VersionedTokens] = []
    asked = Sampling(max_tokens=8, min_tokens=2, seed=5, stop=("!",))
    task = asyncio.create_task(router.generate("r", [1, 2], asked, 3, None, parts.append))
    await settled()
    one.streams["r"].on_part(VersionedTokens([7], [-0.5], [3]))
    one.streams["r"].on_part(VersionedTokens([8, 9], [-0.25, -1.0], [3, 4]))
    announce(router, ["two"])
    await settled()
    rest = two.streams["r.1"]
    assert (rest.prompt, rest.written) == ([1, 2, 7, 8, 9], 3)
    assert rest.sampling == Sampling(max_tokens=5, min_tokens=0, seed=seed_of("5.3"), stop=("!",))
    rest.on_part(VersionedTokens([10], [-2.0], [4]))
    rest.future.set_result(Sample.of([10, 11], [-2.0, -4.0], [4, 5], Finish.STOP, "!"))
    sample = await task
    assert sample.tokens.tolist() == [7, 8, 9, 10, 11]
    assert sample.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -4.0]
    assert sample.versions.tolist() == [3, 3, 4, 4, 5]
    assert (sample.finish, sample.stop) == (Finish.STOP, "!")
    assert [token for part in parts for token in part.tokens] == [7, 8, 9, 10]


@pytest.mark.parametrize("form", [{"structured_outputs": {"regex": "a*"}}, {"presence_penalty": 1.0}])
async def test_a_streamed_answer_whose_rest_would_have_another_distribution_fails(form: dict[str, Any]) -> None:
    """generate-12"""
    router, one, two = one_and_two()
    announce(router, ["one"])
    asked = Sampling(max_tokens=8, **form)
    task = asyncio.create_task(router.generate("r", [1], asked, 0, None, lambda part: None))
    untouched = asyncio.create_task(router.generate("s", [1], asked, 0, None, lambda part: None))
    await settled()
    one.streams["r"].on_part(VersionedTokens([7], [-0.5], [3]))
    announce(router, ["two"])
    with pytest.raises(AnswerBroken, match="died after 1 tokens of a streamed answer"):
        await task
    assert list(two.streams) == ["s.1"]
    two.streams["s.1"].future.set_result(Sample.of([9], [0.0], [0], Finish.STOP))
    assert (await untouched).tokens.tolist() == [9]

"""The router against replicas that answer, hang, fail and die on command."""

import asyncio
from typing import Any

import pytest

from goaly.generate.request import Sampling
from goaly.generate.router import Router

SAMPLING = Sampling(max_tokens=4)


class FakeReplica:
    """A replica and the line to it: answers with its own name; holds requests while `gate` is closed."""

    def __init__(self, name: str):
        self.name = name
        self.seen: list[str] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._answering: list[asyncio.Task[str]] = []

    def ask(self, request_id: str, tokens: list[int], sampling: Sampling, min_version: int) -> asyncio.Task[str]:
        self.seen.append(request_id)
        self._answering.append(asyncio.ensure_future(self._answer()))
        return self._answering[-1]

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        for answering in self._answering:
            answering.cancel()

    async def _answer(self) -> str:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.name


def routing() -> tuple[Router, FakeReplica, FakeReplica]:
    return Router(connect=lambda replica: replica), FakeReplica("one"), FakeReplica("two")


async def ask(router: Router, request_id: str = "r", session: str | None = None) -> Any:
    return await router.generate(request_id, [1], SAMPLING, 0, session)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_go_to_the_least_loaded_replica() -> None:
    router, one, two = routing()
    router.update({0: one, 1: two})
    one.gate.clear()
    two.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"r{i}")) for i in range(4)]
    await settled()
    assert (len(one.seen), len(two.seen)) == (2, 2)
    one.gate.set()
    two.gate.set()
    await asyncio.gather(*tasks)


async def test_a_session_stays_with_its_replica_even_when_that_is_busier() -> None:
    router, one, two = routing()
    router.update({0: one, 1: two})
    first = await ask(router, "a", session="s")
    busy = one if first == "one" else two
    busy.gate.clear()
    tasks = [asyncio.create_task(ask(router, f"b{i}", session="s")) for i in range(3)]
    await settled()
    assert len(busy.seen) == 4
    busy.gate.set()
    assert set(await asyncio.gather(*tasks)) == {busy.name}


async def test_requests_of_a_lost_replica_finish_elsewhere_without_their_caller_noticing() -> None:
    router, one, two = routing()
    one.gate.clear()
    router.update({0: one})
    tasks = [asyncio.create_task(ask(router, f"r{i}")) for i in range(3)]
    await settled()
    assert len(one.seen) == 3
    router.update({1: two})  # RO-1
    assert await asyncio.gather(*tasks) == ["two"] * 3
    assert one.cancelled == []


async def test_with_no_replica_requests_wait_for_one() -> None:
    router, one, _ = routing()
    task = asyncio.create_task(ask(router))
    await settled()
    assert not task.done()  # RO-2
    router.update({0: one})
    assert await task == "one"


async def test_a_cancelled_request_is_cancelled_at_its_replica() -> None:
    router, one, _ = routing()
    one.gate.clear()
    router.update({0: one})
    task = asyncio.create_task(ask(router, "mine"))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.cancelled == ["mine"]  # RO-3


async def test_a_caller_cancelled_as_its_replica_dies_is_cancelled_not_retried() -> None:
    router, one, two = routing()
    one.gate.clear()
    router.update({0: one})
    task = asyncio.create_task(ask(router))
    await settled()
    task.cancel()
    router.update({1: two})
    with pytest.raises(asyncio.CancelledError):
        await task
    assert two.seen == []


async def test_an_application_error_reaches_the_caller_and_is_not_retried() -> None:
    router, one, two = routing()
    one.error = two.error = ValueError("bad request")
    router.update({0: one, 1: two})
    with pytest.raises(ValueError, match="bad request"):
        await ask(router)
    assert len(one.seen) + len(two.seen) == 1  # RO-4

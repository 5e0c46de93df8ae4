"""The generator's actor without an engine: before its start it is to its callers as a replica that is lost."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from goaly.base.errors import ReplicaLost
from goaly.base.process import ProcessMark, process_mark, this_process
from goaly.generate.connection import Isolate, Leave, Submit, Ways, Withdraw
from goaly.generate.generator import Generator
from goaly.generate.request import Request, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings


@pytest.fixture
def generator() -> Generator:
    return Generator(GeneratorSettings(), ModelSettings())


def call(generator: Generator, endpoint: str, *arguments: Any) -> Awaitable[Any]:
    """The actor's own code without Monarch around it."""
    return getattr(Generator, endpoint)._method.__wrapped__(generator, *arguments)


def from_elsewhere(mark: ProcessMark) -> tuple[Ways, asyncio.Queue[Any]]:
    """The ways of a client on another host, and what is sent to it."""
    sent: asyncio.Queue[Any] = asyncio.Queue()
    port: Any = SimpleNamespace(send=sent.put_nowait)
    return Ways(mark, "\0nobody", port), sent


async def test_before_the_start_a_request_ends_as_at_a_lost_replica(generator: Generator) -> None:
    ways, sent = from_elsewhere(this_process())
    connected = asyncio.ensure_future(call(generator, "connect", "client", ways))
    assert await sent.get() == []
    requests = [Request(name, [1], Sampling(), 0) for name in ("one", "other")]
    await call(generator, "tell", "client", Submit(requests))
    results = await sent.get()
    assert [name for name, _ in results] == ["one", "other"]
    assert all(isinstance(result, ReplicaLost) for _, result in results)
    await call(generator, "tell", "client", Withdraw(["one"]))
    await call(generator, "tell", "client", Leave())
    await call(generator, "close")
    await connected


@pytest.mark.parametrize(("endpoint", "arguments"), [("version_at_least", (1,)), ("stats", ())])
async def test_before_the_start_a_question_raises_as_at_a_lost_replica(
    generator: Generator, endpoint: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ReplicaLost, match="the generator has not started"):
        await call(generator, endpoint, *arguments)


async def test_the_requests_of_a_client_end_with_its_process_and_those_of_others_go_on(generator: Generator) -> None:
    ended: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    running: dict[str, Any] = {}

    async def stop() -> None: ...

    generator._engine_loop = SimpleNamespace(  # type: ignore[assignment]
        requests=running,
        submit=lambda request, deliver: running.update({request.request_id: deliver}),
        cancel=lambda names: names and ended.set_result(names),
        stop=stop,
    )
    client = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    connected = []
    for name, mark in (("dies", process_mark(client.pid)), ("lives", this_process())):
        ways, sent = from_elsewhere(mark)
        connected.append(asyncio.ensure_future(call(generator, "connect", name, ways)))
        assert await sent.get() == []
        requests = [Request(f"{name}.{index}", [1], Sampling(), 0) for index in range(3)]
        await call(generator, "tell", name, Submit(requests))
    running.pop("dies.1")("dies.1", ReplicaLost("an answer"))
    generator._send_round()
    await call(generator, "tell", "dies", Isolate("dies.suspect"))
    client.kill()
    await client.wait()
    assert sorted(await asyncio.wait_for(ended, 10)) == ["dies.0", "dies.2", "dies.suspect"]
    running.clear()
    await call(generator, "close")
    await asyncio.gather(*connected)

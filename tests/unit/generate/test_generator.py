"""The generator's actor without an engine: before its start it is to its callers as a replica that is lost."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from goaly.errors import ReplicaLost
from goaly.generate.generator import Generator
from goaly.generate.request import Request, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.liveness import process_mark, this_process
from goaly.models.settings import ModelSettings


@pytest.fixture
def generator() -> Generator:
    return Generator(GeneratorSettings(), ModelSettings())


def call(generator: Generator, endpoint: str, *arguments: Any) -> Awaitable[Any]:
    """The actor's own code without Monarch around it."""
    return getattr(Generator, endpoint)._method.__wrapped__(generator, *arguments)


async def test_before_the_start_a_request_ends_as_at_a_lost_replica(generator: Generator) -> None:
    sent: list[tuple[str, Any]] = []
    connected = asyncio.ensure_future(
        call(generator, "connect", "client", SimpleNamespace(send=sent.extend), this_process())
    )
    await asyncio.sleep(0)
    await call(generator, "submit", "client", [Request(name, [1], Sampling(), 0) for name in ("one", "other")])
    await asyncio.sleep(0)
    assert [name for name, _ in sent] == ["one", "other"]
    assert all(isinstance(result, ReplicaLost) for _, result in sent)
    await call(generator, "cancel", ["one"])
    await call(generator, "disconnect", "client", ["other"])
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
    port = SimpleNamespace(send=lambda results: None)
    client = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    connected = [
        asyncio.ensure_future(call(generator, "connect", name, port, mark))
        for name, mark in (("dies", process_mark(client.pid)), ("lives", this_process()))
    ]
    await asyncio.sleep(0)
    for name in ("dies", "lives"):
        requests = [Request(f"{name}.{index}", [1], Sampling(), 0) for index in range(3)]
        await call(generator, "submit", name, requests)
    running.pop("dies.1")("dies.1", ReplicaLost("an answer"))
    await call(generator, "isolate", "dies", "dies.suspect")
    client.kill()
    await client.wait()
    assert sorted(await asyncio.wait_for(ended, 10)) == ["dies.0", "dies.2", "dies.suspect"]  # GE-5
    await call(generator, "close")
    await asyncio.gather(*connected)

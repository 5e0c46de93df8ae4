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
from goaly.models.settings import ModelSettings


@pytest.fixture
def generator() -> Generator:
    return Generator(GeneratorSettings(), ModelSettings())


def call(generator: Generator, endpoint: str, *arguments: Any) -> Awaitable[Any]:
    """The actor's own code without Monarch around it."""
    return getattr(Generator, endpoint)._method.__wrapped__(generator, *arguments)


async def test_before_the_start_a_request_ends_as_at_a_lost_replica(generator: Generator) -> None:
    sent: list[tuple[str, Any]] = []
    connected = asyncio.ensure_future(call(generator, "connect", "client", SimpleNamespace(send=sent.extend)))
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

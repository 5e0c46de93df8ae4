"""Environments behind a real HTTP function: `servers/counting.py`."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from broken_replies import BROKEN

from goaly.base.telemetry.metrics import counting
from goaly.environments.http_function import HttpFunction
from goaly.environments.limits import EnvironmentLimits, LimitedEnvironment
from goaly.environments.protocol import ActionRefused, EnvironmentDied, EnvironmentFailed, EnvironmentTimeout, Unsent
from goaly.environments.server_process import Command, Server

SERVERS = Path(__file__).parent / "servers"


def number(value):
    return {"number": value}


async def test_a_function_is_played_refuses_and_is_retried_only_if_it_may_be(tmp_path):
    """environments-2."""
    uvicorn = [sys.executable, "-m", "uvicorn", "counting:app", "--fd", "{fd}"]
    command = Command(arguments=uvicorn, folder=SERVERS, log=tmp_path / "log")
    async with Server(command) as server:
        limits = EnvironmentLimits(step_seconds=0.5)
        safe = LimitedEnvironment(HttpFunction(server, "/play", idempotent=True), EnvironmentLimits())
        assert (await safe.reset({"start": 90})).content == 90
        with counting() as counts:
            with pytest.raises(ActionRefused, match="must be an integer"):
                await safe.step(number("x"))
            result = await safe.step(number(4))
            assert (result.observation, result.reward, result.done) == (94, 0.4, False)
            result = await safe.step(number(503))
        assert (result.observation, result.done) == (597, True)
        assert counts == {"environment/retries": 2, "environment/refused": 1, "environment/steps": 2}
        with pytest.raises(EnvironmentFailed, match="reward='much'"):
            await safe.step(number("nonsense"))

        once = LimitedEnvironment(HttpFunction(server, "/play"), limits)
        await once.reset({})
        with counting() as counts:
            with pytest.raises(EnvironmentTimeout):
                await once.step(number("wait"))
            await once.reset({})
            with pytest.raises(EnvironmentDied, match="exit code 9"):
                await once.step(number("end"))
        assert counts == {"environment/timeouts": 1, "environment/resets": 1, "environment/deaths": 1}
        with pytest.raises(EnvironmentDied):
            await safe.step(number(1))
        assert (await safe.reset({"start": 5})).content == 5, "a new episode starts a new process"
        await safe.close()
        await once.close()
        assert not safe.alive


async def test_an_idempotent_step_is_sent_again_when_its_connection_breaks():
    """environments-2."""
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        requests.append(await reader.readexactly(length))
        if len(requests) not in (2, 4):
            reply = b'{"observation": "there"}'
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(reply) + reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for idempotent in (True, False):
            environment = LimitedEnvironment(HttpFunction(url, idempotent=idempotent))
            await environment.reset({})
            if idempotent:
                assert (await environment.step({})).observation == "there"
                assert requests[1] == requests[2], "the same episode and step"
                requests.pop()
            else:
                with counting() as counts, pytest.raises(EnvironmentFailed, match="the connection broke"):
                    await environment.step({})
            await environment.close()
    assert counts == {"environment/errors": 1}


@pytest.mark.usefixtures("at_most_4000_characters")
@pytest.mark.parametrize("what", BROKEN)
async def test_an_episode_at_a_broken_function_fails_by_its_environment(what):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reply = BROKEN[what].encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(reply) + reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        environment = HttpFunction(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        environment._process = await environment._server.running()
        with pytest.raises(EnvironmentFailed) as failed:
            await environment.step({})
        assert type(failed.value) is EnvironmentFailed
        assert len(str(failed.value)) < 1000
        await environment.close()


class DyingFirst:
    """A server whose process refuses connections, because it dies, until it is started again."""

    url = "http://127.0.0.1:1"
    alive = True

    def __init__(self, server: Server):
        self._server = server
        self._starts = 0

    async def running(self) -> Any:
        self._starts += 1
        return self if self._starts == 1 else await self._server.running()

    async def unless_dead(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except Unsent as refused:
            raise EnvironmentDied("ended with signal SIGKILL") from refused


async def test_an_episode_begins_in_the_process_that_takes_a_dying_ones_place(command):
    """environments-2."""
    async with Server(command("counting.py", "{port}")) as server:
        game: Any = HttpFunction(DyingFirst(server), "/play")  # type: ignore[bad-argument-type]
        environment = LimitedEnvironment(game)
        with counting() as counts:
            assert (await environment.reset({"start": 3})).content == 3
        assert counts == {"environment/retries": 1, "environment/resets": 1}
        await environment.close()


async def test_what_was_not_sent_is_retried():
    environment = LimitedEnvironment(HttpFunction("http://127.0.0.1:1"), EnvironmentLimits(retries=2))
    with counting() as counts, pytest.raises(Unsent, match="cannot connect"):
        await environment.reset({})
    assert counts == {"environment/retries": 2, "environment/errors": 1}
    await environment.close()


async def test_a_cancelled_step_closes_its_connection():
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"observation": 1}')
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        environment = LimitedEnvironment(HttpFunction(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await environment.reset({})
        step = asyncio.create_task(environment.step({}))
        await arrived.wait()
        step.cancel()
        async with asyncio.timeout(10):
            await closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await step
        await environment.close()

"""Connections on which half a request comes, or too much of one, end; others stay."""

import asyncio
import re
from contextlib import suppress

import httpx
import pytest
from http_sessions import QUESTION, Serve, Served, of_openai

pytestmark = pytest.mark.asyncio(loop_scope="module")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
WITH_A_WRONG_KEY = HEAD + b"authorization: Bearer wrong\r\ncontent-length: 9\r\n"


async def statuses(served: Served, *parts: bytes) -> list[int]:
    """The responses on a connection on which these parts are sent, once the server has ended it."""
    url = httpx.URL(served.endpoint.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    answer = b""
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
        answer = await reader.read()  # unblocked by the server
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)]


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"", []),
        (HEAD[:20], []),
        (HEAD + b"x-more: ", []),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD, [200]),
        (WITH_A_WRONG_KEY + b"\r\n{", [401]),
    ],
)
async def test_a_connection_ends_if_the_rest_of_a_request_does_not_come(
    serve: Serve, sent: bytes, got: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goaly.agents.http_connection.HEAD_SECONDS", 0.2)
    with serve() as served:
        assert await statuses(served, sent) == got


MANY_HEADERS = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(66))


@pytest.mark.parametrize(
    ("rest", "got"),
    [(MANY_HEADERS + b"\r\n", [[400]]), (b"x: " + b"y" * 1_000_000, [[400], []])],  # it may end while it is read
    ids=["whole", "one without an end"],
)
async def test_a_head_that_is_too_large_ends_its_connection(
    serve: Serve, rest: bytes, got: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goaly.agents.http_connection.HEAD_SECONDS", 3600)
    with serve() as served:
        assert await statuses(served, HEAD, rest) in got


async def test_a_client_may_wait_between_requests_and_for_its_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = []
    monkeypatch.setattr("goaly.agents.http_connection.HttpConnection._must_come", lambda one: timers.append(True))
    monkeypatch.setattr("goaly.agents.http_connection.HttpConnection._has_come", timers.clear)
    with serve() as served:
        client = of_openai(served)
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=[QUESTION])
            assert timers == []

"""The client of `bench.gateway`, in a process of its own: it asks by HTTP for streamed chats, many at once.

It reads its orders from standard input and writes what it saw to standard output. It does as little as a client can:
what it costs is missing in the arm that it is compared with.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

END = b"data: [DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a client."""

    streams: int
    """Connections, each of which asks one chat after the other."""
    chats: int
    """Chats of each stream."""
    tokens: int
    """Mean length of the answers."""

    def request(self, url: str, keys: list[str], question: str) -> dict[str, Any]:
        """The orders of a client: a key for each stream."""
        return {"url": url, "keys": keys, "question": question, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements under one load."""

    seconds: float
    tokens: int
    """Sampled tokens of all answers."""
    latencies: list[float]
    """Seconds from each request to the end of its answer."""


def answer_tokens(mean: int, stream: int, chat: int) -> int:
    """The length of an answer, the same in every arm: from half the mean to one and a half times as much. Streams with
    answers of one length would all ask at once, again and again."""
    spread = mean // 2
    return mean - spread + (37 * stream + 101 * chat) % (2 * spread + 1)


async def ask(orders: Mapping[str, Any]) -> Seen:
    """Ask all chats."""
    latencies: list[float] = []
    began = time.perf_counter()
    written = await asyncio.gather(*(_stream(orders, number, latencies) for number in range(len(orders["keys"]))))
    return Seen(seconds=time.perf_counter() - began, tokens=sum(written), latencies=latencies)


async def _stream(orders: Mapping[str, Any], number: int, latencies: list[float]) -> int:
    address, key = urlsplit(orders["url"]), orders["keys"][number]
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": orders["question"]}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\n"
    )
    written = 0
    for chat in range(orders["chats"]):
        began = time.perf_counter()
        tokens = answer_tokens(orders["tokens"], number, chat)
        text = json.dumps({**body, "max_tokens": tokens, "min_tokens": tokens})
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        written += await _answer(reader)
        latencies.append(time.perf_counter() - began)
    writer.close()
    return written


async def _answer(reader: asyncio.StreamReader) -> int:
    """The number of tokens of the next answer."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read(2000)!r}")
    said = await reader.readuntil(END)
    await reader.readuntil(b"\r\n0\r\n\r\n")
    usage = said[said.rindex(b'"usage":') + len(b'"usage":') :]
    return int(json.JSONDecoder().raw_decode(usage.decode().lstrip())[0]["completion_tokens"])


if __name__ == "__main__":
    seen = asyncio.run(ask(json.load(sys.stdin)))
    json.dump(asdict(seen), sys.stdout)

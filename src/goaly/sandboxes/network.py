"""The network of a sandbox: nothing, one address, or listed hosts.

A sandbox has a network of its own with nothing but a loopback. A port that listens there can be accepted from outside,
so a program inside reaches exactly what the host connects it with; no route, bridge or firewall rule is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from goaly.sandboxes.sandbox import Closable, Handler, Sandbox

HEAD_SECONDS = 30.0


async def forward(sandbox: Sandbox, port: int, host: str, to: int) -> Closable:
    """Connect 127.0.0.1:`port` inside the sandbox with `host:to` outside, while the server is open."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(reader, writer, host, to)

    return await _serve(sandbox, port, handle)


async def allow(sandbox: Sandbox, port: int, hosts: Sequence[str]) -> Closable:
    """An HTTP proxy at 127.0.0.1:`port` inside, for these hosts only. `.example.org` allows all below it, too."""
    allowed = [name.lower() for name in hosts]

    def permits(name: str) -> bool:
        name = name.lower().rstrip(".")
        return any(name == one or (one.startswith(".") and (name.endswith(one) or name == one[1:])) for one in allowed)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        method, _, target = line.decode("latin-1").partition(" ")
        target, _, version = target.rpartition(" ")
        tunnel = method == "CONNECT"
        url = urlsplit(f"//{target}" if tunnel else target)
        try:
            name, to = url.hostname or "", url.port or (443 if tunnel else 80)
        except ValueError:
            name, to = "", 0
        if not permits(name) or (not tunnel and url.scheme != "http"):
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        elif tunnel:
            await _join(reader, writer, name, to, answer=b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            # One request a connection: the next one might name another host.
            kept = [
                field
                for field in rest.split(b"\r\n")
                if not field.lower().startswith((b"connection:", b"proxy-", b"host:"))
            ]
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            fields = [
                f"{method} {path} {version}".encode(),
                f"Host: {url.netloc}".encode(),
                b"Connection: close",
                *kept,
            ]
            await _join(reader, writer, name, to, first=b"\r\n".join(fields))

    return await _serve(sandbox, port, handle)


async def _serve(sandbox: Sandbox, port: int, handle: Handler) -> Closable:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await handle(reader, writer)
        writer.close()

    return await sandbox.serve(port, guarded)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    port: int,
    *,
    answer: bytes = b"",
    first: bytes = b"",
) -> None:
    """Copy both ways between a connection from inside and a new one to `host:port`, until both have ended."""
    try:
        outside_reader, outside_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        return
    writer.write(answer)
    outside_writer.write(first)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
            sink.write_eof()

    try:
        await asyncio.gather(copy(reader, outside_writer), copy(outside_reader, writer))
    finally:
        outside_writer.close()

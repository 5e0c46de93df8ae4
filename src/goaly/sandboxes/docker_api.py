"""Docker's HTTP API on a unix socket, as dockerd and podman serve it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from goaly.sandboxes.contract import SandboxDied, SandboxError, SandboxUnavailable

if TYPE_CHECKING:
    import aiohttp

STDOUT, STDERR = 1, 2
PART_HEAD = 8
"""Bytes before each part of a command's output: its stream, three zeros, its length."""
MOST_ERROR = 2000


class NotThere(SandboxError):
    """The daemon knows no such container or image."""


class Conflict(SandboxError):
    """The daemon refuses because of what is there, or already under way."""


class ExecStream:
    """The standard streams of a process in a container: `read` has its output, `write` goes to its input."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.errors = b""
        """The last that it wrote to its error stream."""

    async def read(self) -> bytes:
        """The next part of its output; none at its end."""
        while True:
            try:
                head = await self._reader.readexactly(PART_HEAD)
            except asyncio.IncompleteReadError:
                return b""
            data = await self._reader.readexactly(int.from_bytes(head[4:], "big"))
            if head[0] == STDOUT:
                return data
            self.errors = (self.errors + data)[-MOST_ERROR:]

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()


class DockerApi:
    """Requests to a daemon. An answer that refuses raises SandboxError with what the daemon says."""

    def __init__(self, address: Path) -> None:
        import aiohttp

        self.address = address
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(address), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            base_url="http://docker",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        record: Any = None,
        body: Any = None,
    ) -> Any:
        """The answer's record; None if it has none. A request has a record, or a body of bytes, or neither."""
        async with self._answered(method, path, query, record, body) as answer:
            text = await answer.text()
        with suppress(ValueError):
            return json.loads(text)
        return None

    async def follow(
        self, path: str, *, query: Mapping[str, str | int] | None = None, body: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The records by which the daemon reports on a long request, such as a pull or a build, as they come."""
        async with self._answered("POST", path, query, None, body) as answer:
            held = b""
            async for part in answer.content.iter_any():
                *lines, held = (held + part).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
            if held.strip():
                yield json.loads(held)

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, query: Mapping[str, str | int] | None, record: Any, body: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        headers = {"Content-Type": "application/x-tar"} if body is not None else None
        try:
            async with self._session.request(
                method, path, params=query, json=record, data=body, headers=headers
            ) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    raise _refusal(answer.status, await answer.text())
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise SandboxUnavailable(f"no daemon of containers answers at {self.address}: {why}") from error

    async def exec(self, container: str, words: list[str], *, user: str) -> ExecStream:
        """A further process in a container, with its streams."""
        wanted = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": words, "User": user}
        made = await self.ask("POST", f"/containers/{container}/exec", record=wanted)
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        reader, writer = await self._connection()
        head = (
            f"POST /exec/{made['Id']}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            status = int(answer.split(None, 2)[1])
            if status not in (HTTPStatus.SWITCHING_PROTOCOLS, HTTPStatus.OK):
                said = (await reader.read(MOST_ERROR)).decode(errors="replace")
                raise SandboxDied(f"the daemon does not run a process in {container}: {said.strip()}")
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise SandboxDied(f"the daemon has closed the connection to {container}") from error
        except BaseException:
            writer.close()
            raise
        return ExecStream(reader, writer)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(str(self.address), limit=1 << 20)
        except OSError as error:
            raise SandboxUnavailable(f"no daemon of containers answers at {self.address}: {error}") from error


def _refusal(status: int, text: str) -> SandboxError:
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["message"]
    kinds = {HTTPStatus.NOT_FOUND: NotThere, HTTPStatus.CONFLICT: Conflict}
    return kinds.get(HTTPStatus(status), SandboxError)(text.strip()[:MOST_ERROR])

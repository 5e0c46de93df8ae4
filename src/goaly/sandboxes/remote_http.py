"""WebSockets of both sides by aiohttp, which only this module imports."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from goaly.base.access import is_loopback, is_one_of
from goaly.sandboxes.contract import SandboxUnavailable
from goaly.sandboxes.remote_wire import BinarySocket

if TYPE_CHECKING:
    from aiohttp import ClientSession, web

PATH = "/v1/sandboxes"
STATUS = "/v1/status"
HEAD_SECONDS = 30.0
"""Time for a request to come, on a new connection or after another request."""
MOST_MESSAGE = 8 << 20
"""Largest message that a server takes. Answers to a client may be larger: it chose their size."""


class AiohttpSocket:
    """A WebSocket of either side."""

    def __init__(self, connected: Any, transport: Any, session: ClientSession | None = None) -> None:
        self._socket = connected
        self._transport = transport
        self._session = session

    async def send(self, data: bytes) -> None:
        await self._socket.send_bytes(data)

    async def receive(self) -> bytes | None:
        from aiohttp import WSMsgType

        message = await self._socket.receive()
        if message.type is WSMsgType.ERROR:
            raise OSError(str(message.data))
        return message.data if message.type is WSMsgType.BINARY else None

    def abort(self) -> None:
        connection = self._transport.get_extra_info("socket")
        with suppress(OSError):
            if connection is not None:  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Free it, after `abort`."""
        if self._session is not None:
            await self._session.close()


async def connect(url: str, key: str | None, tls: ssl.SSLContext | None, seconds: float) -> AiohttpSocket:
    """A connection to the server at a URL; SandboxUnavailable if there is none."""
    from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, WSServerHandshakeError

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    session = ClientSession(connector=TCPConnector(ssl=tls or True), timeout=ClientTimeout(total=None))
    try:
        async with asyncio.timeout(seconds):
            connected = await session.ws_connect(f"{url}{PATH}", headers=headers, max_msg_size=0, compress=0)
    except BaseException as error:
        await session.close()
        if isinstance(error, WSServerHandshakeError):
            why = error.headers.get("X-Reason", error.message) if error.headers else error.message
            raise SandboxUnavailable(f"{error.status} {why}") from error
        if isinstance(error, ClientError | OSError):
            why = f"has not answered within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)
            raise SandboxUnavailable(why) from error
        raise
    return AiohttpSocket(connected, connected, session)


class HttpListener:
    """Listens for clients, and gives each connection of one with a token to `serve`."""

    def __init__(
        self,
        tokens: Sequence[str],
        serve: Callable[[BinarySocket], Awaitable[None]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """Without `tokens`, whoever reaches the address on this machine is served."""
        self._tokens = tokens
        self._serve = serve
        self._status = status
        self._runner: web.AppRunner | None = None

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve from now on."""
        from aiohttp import web

        app = web.Application(client_max_size=0)
        app.router.add_get(PATH, self._connection)
        app.router.add_get(STATUS, self._status_page)
        quiet = {"access_log": None, "handle_signals": False}
        self._runner = web.AppRunner(app, **quiet, keepalive_timeout=HEAD_SECONDS, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, ssl_context=tls, backlog=1024).start()

    async def close(self) -> None:
        """End all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        """A web page's script sends its origin, and is never served."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        if self._tokens and not is_one_of(given, self._tokens):
            return _refused(HTTPStatus.UNAUTHORIZED, "the key is not one of this server's tokens")
        if "Origin" in request.headers or not (self._tokens or is_loopback(request.url.host or "")):
            return _refused(HTTPStatus.FORBIDDEN, "web pages are not served")
        return None

    async def _status_page(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return self._refusal(request) or web.json_response(self._status())

    async def _connection(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if (refusal := self._refusal(request)) is not None:
            return refusal
        connected = web.WebSocketResponse(max_msg_size=MOST_MESSAGE, compress=False, timeout=1.0)
        await connected.prepare(request)
        await self._serve(AiohttpSocket(connected, request.transport))
        return connected


def _refused(status: HTTPStatus, why: str) -> web.Response:
    from aiohttp import web

    return web.json_response({"error": why}, status=status, headers={"X-Reason": why})

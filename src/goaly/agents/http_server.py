"""The HTTP server of the endpoint. It runs on an event loop that others use, too.

A request that gets in has the session of its key, and the call that it repeats, in `EXCHANGE`. Every error has the
format of the API that was called.
"""

import asyncio
import gc
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.http_connection import HttpConnection
from goaly.agents.http_session import EXCHANGE, Exchange, HttpSession, Repeats
from goaly.agents.refusals import HEALTH, SCHEMA, Refusal, error_response
from goaly.base.process import give_up

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope = MutableMapping[str, Any]

SAMPLED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths whose requests the policy answers."""
REWARDED = "/reward"
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses at which agents on other machines reach a worker by its host's name."""
IDLE_SECONDS = 600
"""Time between two requests for which a client's connection stays open."""
MOST_DIGITS = 18
"""Of a number in a header."""
MOST_BODY_BYTES = 64 << 20
"""Largest request."""
BODY_SECONDS = 120.0
"""Longest time for a request's body to come."""


class AppServer:
    """Serves an app until `close`. The process ends if it cannot."""

    def __init__(self, app: Any, listener: socket.socket):
        quiet: dict[str, Any] = {
            "http": HttpConnection,
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",
        }
        self._server = _Server(uvicorn.Config(app, interface="asgi3", timeout_keep_alive=IDLE_SECONDS, **quiet))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="agents' endpoint")
        self._serving.add_done_callback(_check_end)

    async def close(self) -> None:
        """Stop serving; requests under way are cancelled."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait([self._serving])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # base-2: only the controller ends this process
        yield


def _check_end(serving: "asyncio.Task[None]") -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        give_up(f"the agents' endpoint: {error}")


class HttpServer(ABC):
    """Serves the APIs to those who have a key of a session."""

    is_open = True
    """Whether requests can be answered."""

    def __init__(self, host: str, listen: Callable[[], socket.socket], folder: str, max_context: int):
        """`listen` gives the socket, which listens at `host`; `folder` is the policy's model folder."""
        self._host = host
        self._listen = listen
        self._folder = folder
        self._max_context = max_context
        self._listener: socket.socket | None = None
        self._server: AppServer | None = None
        self.url = ""
        """As OpenAI's clients take it."""

    @abstractmethod
    async def check(self, key: str, headers: Mapping[str, str]) -> None:
        """Raise a Refusal if nobody has this key, or a client with these headers must not be answered."""

    @abstractmethod
    def session(self, key: str, path: str, body: bytes, repeats: Repeats) -> HttpSession:
        """The session of a request with this key."""

    def listen(self) -> socket.socket:
        """Take the port, if it is not taken; OSError if another process has it. Clients that connect wait."""
        if self._listener is None:
            host, self._listener = self._host, self._listen()
            name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
            self.url = f"http://{name}:{self._listener.getsockname()[1]}/v1"
        return self._listener

    async def start(self, parser: AnswerParser) -> None:
        """Import the APIs, which takes seconds, and serve them. `parser` reads the answers of all sessions."""
        listener = self.listen()

        def imported() -> Any:
            from goaly.agents.routes import app  # imports vLLM's APIs: 8 s

            parser.load()
            return app(self._folder, self._max_context, parser)

        self._app = await asyncio.to_thread(imported)
        gc.freeze()  # a full collection would look at all of vLLM's modules, and stop the event loop meanwhile
        self._server = AppServer(self._answer, listener)

    async def close(self) -> None:
        """Stop serving; requests under way are cancelled."""
        if self._server is not None:
            await self._server.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI app."""
        path = scope["path"]
        if path in (HEALTH, SCHEMA):
            return await self._app({**scope, "state": {"is_open": self.is_open}}, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        key = key_of(headers)
        try:
            await self.check(key, headers)
            if (encoding := headers.get("content-encoding", "identity")) != "identity":
                compressed = f"content-encoding={encoding}: a request's body must not be compressed"
                raise Refusal(compressed, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            body = await body_of(receive)
            repeats = _repeats(headers)
            served = self.session(key, path, body, repeats)
            is_call = path in SAMPLED or path.endswith(REWARDED)
            call = served.call(path, body, repeats) if is_call else None
        except Refusal as refused:
            return await error_response(path, refused)(scope, receive, send)
        delivery = _Delivery(body, receive, send)
        token = EXCHANGE.set(Exchange(served, call))
        try:
            await self._app({**scope, "state": {}}, delivery.receive, delivery.send)
        finally:
            EXCHANGE.reset(token)
            if call is not None:
                served.ended(call, delivered=delivery.delivered)


class _Delivery:
    """The messages of a request whose body has been read. It notices whether the client got the whole response."""

    def __init__(self, body: bytes, receive: Receive, send: Send):
        self.delivered = False
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._gone = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()  # Unblocked by the client or the server.
        self._gone = self._gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._send(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        self.delivered = self.delivered or (is_last and not self._gone)


def _repeats(headers: Mapping[str, str]) -> Repeats:
    """The headers about earlier attempts."""
    retries = headers.get("x-stainless-retry-count", "0")
    if not retries.isdecimal() or len(retries) > MOST_DIGITS:
        raise Refusal(f"x-stainless-retry-count={retries}: must be a number", HTTPStatus.BAD_REQUEST, "invalid_header")
    return Repeats(int(retries), headers.get("idempotency-key"))


def key_of(headers: Mapping[str, str]) -> str:
    """The API key of a request, as the clients of OpenAI or Anthropic send it; empty if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > MOST_BODY_BYTES:
                    too_large = f"a request must have at most {MOST_BODY_BYTES} bytes"
                    raise Refusal(too_large, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large")
                if not message.get("more_body"):  # or the client has gone
                    return bytes(body)
    except TimeoutError:
        late = f"the body of the request has not come within {BODY_SECONDS:g} s"
        raise Refusal(late, HTTPStatus.REQUEST_TIMEOUT, "request_timeout") from None

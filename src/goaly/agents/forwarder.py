"""An HTTP endpoint whose requests go on to an API elsewhere, for agents that are evaluated there.

Agents name a model and sampling parameters, or none. Here a request gets the model of the evaluation, and those of its
parameters that the agent does not name, as it would at an endpoint of goaly's own.

Agents get a key of this endpoint; that of the API elsewhere never reaches them.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from goaly.agents.http_server import AppServer, key_of
from goaly.agents.refusals import Refusal, error_response
from goaly.base.access import listening
from goaly.base.json_text import bounded_json
from goaly.generate.request import Sampling, seed_of
from goaly.generate.settings import NEUTRAL

LOOPBACK = "127.0.0.1"
PASSED_ON = ("accept", "anthropic-beta", "anthropic-version", "content-type")
"""Headers of agents that go on; others are of the connection, or hold the key."""
LIMITS = {"/responses": "max_output_tokens", "/messages": "max_tokens"}
"""Names of the token limit, by path; all others `max_tokens`, or `max_completion_tokens`."""
WITH_SEEDS = ("/chat/completions", "/completions")
"""Paths whose requests take all parameters."""


@dataclass(slots=True, kw_only=True, eq=False)
class Forwarded:
    """The way of one episode's requests."""

    base_url: str
    api_key: str
    sampling: Sampling
    seeds: str
    requests: int = 0
    tokens: int | None = 0
    """How many tokens the policy has written; None if a response does not say it."""


class Forwarder:
    """Forwards requests to the API at `url`."""

    def __init__(self, url: str, model: str, key: str):
        self._url = url.rstrip("/")
        self._model = model
        self._key = key
        self._episodes: dict[str, Forwarded] = {}
        self._address = ""

    async def start(self) -> None:
        """Serve on this machine."""
        import httpx

        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        listener = listening(LOOPBACK, 0)
        self._address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1"
        methods = ["GET", "POST"]
        app = Starlette(routes=[Route("/v1/{path:path}", self._forward, methods=methods)])
        self._server = AppServer(app, listener)

    async def close(self) -> None:
        """Stop serving."""
        await self._server.close()
        await self._client.aclose()

    @contextmanager
    def serve(self, sampling: Sampling, seeds: str) -> Iterator[Forwarded]:
        """A way for one episode, until the block ends. `sampling` has the parameters that its agent does not name, and
        its seeds are made of `seeds`."""
        key = secrets.token_hex(24)
        episode = Forwarded(base_url=self._address, api_key=key, sampling=sampling, seeds=seeds)
        self._episodes[key] = episode
        try:
            yield episode
        finally:
            del self._episodes[key]

    async def _forward(self, request: Request) -> Response:
        episode = self._episodes.get(key_of(request.headers))
        if episode is None:
            unknown = "the API key is of no episode that is open"
            return error_response(request.url.path, Refusal(unknown, HTTPStatus.UNAUTHORIZED, "invalid_api_key"))
        path = request.url.path.removeprefix("/v1")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers |= {"authorization": f"Bearer {self._key}", "x-api-key": self._key}
        body = await request.body()
        if request.method == "POST":
            seed = seed_of(f"{episode.seeds}.{episode.requests}")
            episode.requests += 1
            try:
                body = self._filled(path, body, episode.sampling, seed)
            except ValueError as error:
                why = f"the body must be JSON that can be passed on: {error}"
                return error_response(request.url.path, Refusal(why, HTTPStatus.BAD_REQUEST, "invalid_request"))
        sent = self._client.build_request(request.method, f"{self._url}{path}", headers=headers, content=body)
        answer = await self._client.send(sent, stream=True)
        kind = answer.headers.get("content-type", "application/json")
        if kind.startswith("text/event-stream"):
            episode.tokens = None
            return StreamingResponse(
                answer.aiter_bytes(), answer.status_code, media_type=kind, background=BackgroundTask(answer.aclose)
            )
        content = await answer.aread()
        if request.method == "POST" and answer.is_success and episode.tokens is not None:
            written = _written(content)
            episode.tokens = None if written is None else episode.tokens + written
        return Response(content, answer.status_code, media_type=kind)

    def _filled(self, path: str, body: bytes, sampling: Sampling, seed: int) -> bytes:
        """The body with the model, and the parameters that it does not name. ValueError if it cannot be read."""
        asked = bounded_json(body)
        if not isinstance(asked, dict):
            return body  # the API elsewhere refuses it
        defaults = parameters(sampling, seed)
        limit = defaults.pop("max_tokens", None)
        if limit is not None and "max_completion_tokens" not in asked:
            defaults[LIMITS.get(path, "max_tokens")] = limit
        if path not in WITH_SEEDS:
            known = ("temperature", "top_p", *LIMITS.values())
            defaults = {name: value for name, value in defaults.items() if name in known}
        given = {name: value for name, value in asked.items() if value is not None}
        return json.dumps({**defaults, **given, "model": self._model}).encode()


def parameters(sampling: Sampling, seed: int | None = None) -> dict[str, Any]:
    """The parameters of a request to an API of OpenAI's kind, as far as it has any. Those that only some servers know
    are left out where they have no effect."""
    named: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    named |= {"max_tokens": sampling.max_tokens, "seed": seed if sampling.seed is None else sampling.seed}
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if name not in named and value not in (None, neutral, {}, ()):
            named[name] = value
    if sampling.stop:
        named["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        named["stop_token_ids"] = list(sampling.stop_token_ids)
    return {name: value for name, value in named.items() if value is not None}


def _written(content: bytes) -> int | None:
    try:
        usage = bounded_json(content)["usage"]
        return int(usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return None

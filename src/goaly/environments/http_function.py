"""Environments behind one HTTP function: an object is posted to a URL, and an object comes back.

    {"episode": "f3…", "step": 0, "task": {…}}      ->  {"observation": …}
    {"episode": "f3…", "step": 1, "action": {…}}    ->  {"observation": …, "reward": 0.5, "done": false}

Status 422 refuses an action. A function that answers the same (episode, step) the same way again is `idempotent`: its
steps are retried after a broken connection or status 502 to 504. Others are retried only if nothing was sent. When the
function's own process has died, its episodes are lost: only `reset` starts it again.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from goaly.base.json_text import MOST_CHARACTERS
from goaly.environments.protocol import (
    ActionRefused,
    Disconnected,
    EnvironmentDied,
    EnvironmentFailed,
    Observation,
    StepResult,
    Unsent,
)
from goaly.environments.replies import SHOWN, observed, read, stepped
from goaly.environments.server_process import Elsewhere, Server, ServerProcess

_ERRORS = 400
_REFUSED = 422
_PASSING = (502, 503, 504)


class HttpFunction:
    """An environment whose every call is one POST."""

    def __init__(
        self,
        server: Server | str,
        path: str = "",
        *,
        idempotent: bool = False,
        headers: Mapping[str, str] | None = None,
    ):
        """`server` is a command's, or a URL; `path` is what the URL lacks. `headers` are sent with each request."""
        self._server = Elsewhere(server) if isinstance(server, str) else server
        self._path = path
        self._idempotent = idempotent
        self._client = httpx.AsyncClient(timeout=None, headers=headers, trust_env=isinstance(server, str))
        self._process: ServerProcess | Elsewhere | None = None
        self._episode = ""
        self._step = 0

    @property
    def alive(self) -> bool:
        """Whether it is open: an episode is a new id for the function, whatever became of the one before."""
        return not self._client.is_closed

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin a new episode, with a new id."""
        self._process = await self._server.running()
        self._episode, self._step = uuid.uuid4().hex, 0
        try:
            reply = await self._post({"task": dict(task)}, again=True)
        except EnvironmentDied as death:
            if isinstance(death.__cause__, Unsent):  # it had no episode of this; a new process can begin it
                raise Unsent(str(death)) from death
            raise
        return observed(reply, self._path or "HTTP function")

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act. ActionRefused at status 422; the step then counts as not taken."""
        self._step += 1
        try:
            return stepped(await self._post({"action": dict(action)}, self._idempotent), self._path or "HTTP function")
        except (ActionRefused, Unsent):
            self._step -= 1
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post(self, body: Mapping[str, Any], again: bool) -> Any:
        if self._process is None:
            raise EnvironmentFailed("HTTP function: no episode has begun; call reset first")
        url = self._process.url + self._path
        request = self._sent(url, {"episode": self._episode, "step": self._step, **body})
        try:
            status, content = await self._process.unless_dead(request)
        except Disconnected as error:
            if not again:
                raise
            raise Unsent(str(error)) from error
        if status in _PASSING and again:
            raise Unsent(f"POST {url}: status {status}")
        if status >= _ERRORS:
            kind = ActionRefused if status == _REFUSED else EnvironmentFailed
            raise kind(f"POST {url}: status {status}: {content[:SHOWN].decode(errors='replace')}")
        return read(content, f"POST {url}")

    async def _sent(self, url: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """The status and the content of the response, which is cut off behind the most that can be read."""
        content = bytearray()
        try:
            async with self._client.stream("POST", url, json=body) as reply:
                async for part in reply.aiter_bytes():
                    content += part
                    if len(content) > MOST_CHARACTERS:
                        break
                return reply.status_code, bytes(content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unsent(f"POST {url}: cannot connect: {error}") from error
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Disconnected(f"POST {url}: the connection broke: {type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise EnvironmentFailed(f"POST {url}: {type(error).__name__}: {error}") from error

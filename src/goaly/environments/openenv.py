"""Environments of an OpenEnv server: a session over its WebSocket `/ws` for each, whose messages are JSON.

The `openenv` package itself is not needed here: it lives in the server's own virtual environment. A task is the keyword
arguments of the environment's `reset`, such as `{"seed": 7}`; an action has the fields of its `Action` class.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from goaly.base.json_text import MOST_CHARACTERS
from goaly.environments.protocol import ActionRefused, Disconnected, EnvironmentFailed, Observation, StepResult, Unsent
from goaly.environments.replies import SHOWN, observed, read, stepped
from goaly.environments.server_process import Elsewhere, Server, ServerProcess

_REFUSALS = ("VALIDATION_ERROR", "EXECUTION_ERROR", "INVALID_JSON")
"""Codes of errors after which the session goes on."""
_FULL = "CAPACITY_REACHED"
"""Code of the error of a server that has as many sessions as it allows (`max_concurrent_envs`)."""


class OpenEnvironment:
    """One session at an OpenEnv server. It connects with the first `reset`."""

    def __init__(self, server: Server | str, *, owns_server: bool = False):
        """`server` is a command's, or the URL of one that somebody else runs. With `owns_server`, `close` closes it."""
        self._server = Elsewhere(server) if isinstance(server, str) else server
        self._owns_server = owns_server
        self._process: ServerProcess | Elsewhere | None = None
        self._connection: ClientConnection | None = None
        self._lost = False

    @property
    def alive(self) -> bool:
        """Whether the session goes on, or none has begun."""
        return not self._lost and (self._process is None or self._process.alive)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin a new episode. A lost session is replaced by a new one, also if only this call finds out: `Unsent`."""
        if self._connection is None or not self.alive:
            await self._connect()
        try:
            return observed(await self._ask("reset", task), "OpenEnv")
        except Disconnected as error:
            raise Unsent(str(error)) from error

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act. ActionRefused if the action does not fit the environment's class, or if the environment raises."""
        if self._connection is None or self._lost:
            raise Disconnected("OpenEnv: there is no session; call reset first")
        return stepped(await self._ask("step", action), "OpenEnv")

    async def close(self) -> None:
        """End the session, and the server if it is owned."""
        self._drop()
        if self._owns_server:
            await self._server.close()

    async def _connect(self) -> None:
        self._drop()
        self._process = await self._server.running()
        url = self._process.url.replace("http", "ws", 1) + "/ws"
        try:
            # Without pings: an environment may compute for longer than their limit. Steps have limits of their own.
            self._connection = await connect(
                url, ping_interval=None, max_size=MOST_CHARACTERS, proxy=None, open_timeout=None
            )
        except (OSError, WebSocketException) as error:
            raise Unsent(f"OpenEnv at {url}: cannot connect: {error}") from error
        self._lost = False

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        assert self._process is not None
        try:
            reply = await self._process.unless_dead(self._exchange(json.dumps({"type": kind, "data": dict(data)})))
        except BaseException:  # also if the call is cancelled: its answer would be taken for that of the next call
            self._drop()
            raise
        data = reply["data"]
        if reply.get("type") == "observation":
            return _without_metadata(data)
        code, why = data.get("code"), f"OpenEnv refused {kind}: {str(data.get('message', reply))[:SHOWN]}"
        if code in _REFUSALS:
            raise ActionRefused(why)
        self._drop()
        raise Unsent(why) if code == _FULL else EnvironmentFailed(why)

    async def _exchange(self, message: str) -> Mapping[str, Any]:
        """The server's reply, an object whose `data` is one."""
        assert self._connection is not None
        try:
            with suppress(ConnectionClosed):  # it may have said why: `recv` returns that first
                await self._connection.send(message)
            text = await self._connection.recv()  # unblocked by the answer, or by the end of the connection
        except ConnectionClosed as error:
            raise Disconnected(f"OpenEnv: the connection was closed: {error}") from error
        reply = read(text, "OpenEnv")
        if not isinstance(reply, Mapping) or not isinstance(reply.get("data"), Mapping):
            raise EnvironmentFailed(f"OpenEnv: the reply must be an object with an object `data`, is {text[:SHOWN]!r}")
        return reply

    def _drop(self) -> None:
        """Close the connection at once: the server ends the session."""
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None
            self._lost = True


def _without_metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply without the copy of its metadata in the observation, which the policy sees."""
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        return data
    return {**data, "observation": {key: value for key, value in observation.items() if key != "metadata"}}

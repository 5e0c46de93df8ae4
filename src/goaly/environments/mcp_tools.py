"""The tools of an MCP server, over stdio or streamable HTTP: what an assistant's tool calls come to.

A mistake of the policy is a message to the policy: a tool that does not exist, arguments that do not fit, a tool that
fails or exceeds its time limit. These are counted as `tools/…`. Only a server that is gone fails the episode.

One task enters and leaves the client of `mcp`, which requires this. Any task may call.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from goaly.base.errors import first_error
from goaly.base.json_text import bounded_json
from goaly.base.telemetry.metrics import count
from goaly.environments.protocol import ActionRefused, Disconnected, EnvironmentDied, EnvironmentTimeout
from goaly.environments.server_process import Command, Elsewhere, ServerProcess
from goaly.prompts.prompt import Message

RESULT_CHARACTERS = 1_000_000
"""Some 250,000 tokens of text."""
_LOST = (mcp_types.CONNECTION_CLOSED,)
"""Codes of errors after which no call can succeed."""


class McpTools:
    """A session at an MCP server. `start` makes one."""

    def __init__(
        self, process: ServerProcess | Elsewhere, owned: bool, call_seconds: float, result_characters: int | None = None
    ):
        self._process = process
        self._owned = owned
        self.call_seconds = call_seconds
        """Time limit of a call."""
        self.result_characters = result_characters
        """The most characters of a result in a tool message, which ends with a mark if it is cut; None is no limit."""
        self.tools: tuple[dict[str, Any], ...] = ()
        """The server's tools as an OpenAI request names them, for `Chat.say` and for prompts."""
        self._client: Client | None = None
        self._silent = False
        self._closing = asyncio.Event()
        self._session: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        server: Command | ServerProcess | str,
        *,
        path: str = "/mcp",
        call_seconds: float = 30.0,
        start_seconds: float = 60.0,
        result_characters: int | None = RESULT_CHARACTERS,
    ) -> "McpTools":
        """A session at a server of its own, which this command starts, at a shared process, or at a URL without `path`.

        A command uses stdio unless it has a place for `{fd}` or `{port}`. A call may take `call_seconds`,
        and a tool message has at most `result_characters` of its result."""
        if isinstance(server, Command):
            process: ServerProcess | Elsewhere = await ServerProcess.start(server)
        else:
            process = Elsewhere(server) if isinstance(server, str) else server
        tools = cls(process, isinstance(server, Command), call_seconds, result_characters)
        try:
            async with asyncio.timeout(start_seconds):
                await tools._begin(path)
        except TimeoutError:
            await tools.close()
            raise EnvironmentTimeout(f"the MCP server has not answered within {start_seconds:g} s") from None
        except BaseException:
            await tools.close()
            raise
        return tools

    @property
    def alive(self) -> bool:
        """Whether its calls can succeed: it is connected, and its last call did not time out."""
        connected = self._session is not None and not self._session.done() and not self._closing.is_set()
        return connected and self._process.alive and not self._silent

    async def answer(self, message: Message) -> list[Message]:
        """The tool messages that answer an assistant's message, one for each call, in order. The calls run in
        parallel."""
        return list(await asyncio.gather(*(self._answer(call) for call in message.tool_calls or ())))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one tool's result; `ToolFailed` if that is an error, EnvironmentTimeout if it takes too long."""
        if self._client is None or self._closing.is_set():
            raise Disconnected("the session at the MCP server is closed")
        try:
            async with asyncio.timeout(self.call_seconds):
                result = await self._process.unless_dead(self._request(name, arguments))
        except TimeoutError:
            self._silent = True
            raise EnvironmentTimeout(f"{name} has not answered within {self.call_seconds:g} s") from None
        self._silent = False
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the session, and the server if it was started for it."""
        self._closing.set()
        if self._owned:
            assert isinstance(self._process, ServerProcess)
            await self._process.stop()  # first: a server that hangs would not let the session end
        if self._session is not None:
            self._session.cancel()
            await asyncio.wait([self._session])

    async def _begin(self, path: str) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = asyncio.create_task(self._keep_session(path, ready), name="MCP session")
        await self._process.unless_dead(_wait_for(ready))

    async def _keep_session(self, path: str, ready: asyncio.Future[None]) -> None:
        """Hold the client open until `close`."""
        try:
            stdio = isinstance(self._process, ServerProcess) and self._process.port is None
            url = "" if stdio else self._process.url + path
            transport = _stdio(self._process) if stdio else streamable_http_client(url)  # type: ignore[arg-type]
            async with Client(transport) as client:
                self.tools = tuple([_tool(tool) async for tool in _all_tools(client)])
                self._client = client
                ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                return  # calls fail with an error of their own
            ready.set_exception(_disconnected(first_error(error)))

    async def _request(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        assert self._client is not None
        assert self._session is not None
        call = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait([call, self._session], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Disconnected("the session at the MCP server has ended")
            return call.result()
        except MCPError as error:
            if error.code in _LOST:
                raise _disconnected(error) from error
            raise ToolFailed(error.message) from error
        finally:
            if not call.done():
                call.cancel()  # tells the server too
                await asyncio.gather(call, return_exceptions=True)

    async def _answer(self, call: Mapping[str, Any]) -> Message:
        count("tools/calls")
        function = call.get("function") or {}
        return Message(
            role="tool",
            content=self._cut(await self._result(function.get("name"), function.get("arguments"))),
            tool_call_id=call.get("id"),
        )

    def _cut(self, result: str) -> str:
        most = self.result_characters
        if most is None or len(result) <= most:
            return result
        count("tools/cut")
        return f"{result[:most]}\n[cut off: {len(result) - most} more characters]"

    async def _result(self, name: Any, arguments: Any) -> str:
        known = [tool["function"]["name"] for tool in self.tools]
        if name not in known:
            count("tools/unknown")
            return f"Error: there is no tool {name}; there are {', '.join(known)}"
        try:
            arguments = bounded_json(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except ValueError as error:
            count("tools/malformed")
            return f"Error: the arguments of {name} are not JSON that can be read: {error}"
        if not isinstance(arguments, Mapping):
            count("tools/malformed")
            return f"Error: the arguments of {name} must be a JSON object"
        try:
            return await self.call(name, arguments)
        except EnvironmentTimeout as error:
            count("tools/timeouts")
            return f"Error: {error}"
        except ToolFailed as error:
            count("tools/failed")
            return f"Error: {error}"
        except EnvironmentDied:
            count("tools/deaths")
            raise
        except Disconnected:
            count("tools/disconnected")
            raise
        except asyncio.CancelledError:
            count("tools/cancelled")
            raise


class ToolFailed(ActionRefused):
    """A tool or its server answered a call with an error; the server goes on."""


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future


async def _all_tools(client: Client) -> AsyncIterator[mcp_types.Tool]:
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        if (cursor := page.next_cursor) is None:
            return


def _tool(tool: mcp_types.Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _text(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    return f"[{block.type}]"  # a picture, a sound or a link: the policy reads text


def _disconnected(error: BaseException) -> Disconnected:
    return Disconnected(f"MCP server: {type(error).__name__}: {error}")


@asynccontextmanager
async def _stdio(process: ServerProcess) -> AsyncIterator[tuple[Any, Any]]:
    """The transport of a process: a JSON-RPC message in each line."""
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_session:
            async for line in process.stdout:
                try:
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue  # something that the server printed
                await to_session.send(SessionMessage(message))

    async def write() -> None:
        async with from_session:
            async for message in from_session:
                process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()

    async with anyio.create_task_group() as tasks, from_server, to_server:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield from_server, to_server
        finally:
            tasks.cancel_scope.cancel()

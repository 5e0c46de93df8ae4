"""Agents with a calculator: they let a policy call the tools of an MCP server until it answers. All that they get of
goaly is the address and the key of an OpenAI API, and a reader of JSON.

`with_openai` is written with OpenAI's client, `with_agents` with the runner of `openai-agents`.
"""

import asyncio
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import httpx2
import mcp
import openai
from mcp.client.streamable_http import streamable_http_client

from goaly.base.json_text import bounded_json

MODEL = "policy"
MOST_TURNS = 4
"""Answers of the policy in a conversation."""


async def with_openai(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """The policy's final answer to these messages; empty if it has none after MOST_TURNS."""
    said: list[Any] = list(messages)
    async with (
        connections() as http,
        mcp.Client(streamable_http_client(await SERVER.url(), http_client=http)) as calculator,
    ):
        policy = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)
        tools: list[Any] = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema}}
            for tool in (await calculator.list_tools()).tools
        ]
        for _ in range(MOST_TURNS):
            made = await policy.chat.completions.create(model=MODEL, messages=said, tools=tools)
            answer = made.choices[0].message
            said.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return answer.content or ""
            for call in answer.tool_calls:
                assert call.type == "function"
                result = await _result(calculator, call.function.name, call.function.arguments)
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def _result(calculator: mcp.Client, name: str, arguments: str) -> str:
    """The text of a tool's result, or the first line of its error."""
    try:
        given = bounded_json(arguments)
    except ValueError as error:
        return str(error)
    if not isinstance(given, dict):
        return "the arguments must be an object"
    try:
        result = await calculator.call_tool(name, given)
    except mcp.MCPError as error:
        return error.message
    text = "".join(part.text for part in result.content if part.type == "text")
    return text.partition("\n")[0] if result.is_error else text


async def with_agents(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """The same by the runner of `openai-agents`."""
    import agents
    from agents.mcp import MCPServerStreamableHttp

    agents.set_tracing_disabled(True)  # it would send what is said to OpenAI
    async with (
        connections() as http,
        MCPServerStreamableHttp(
            params={"url": await SERVER.url(), "httpx_client_factory": connections}, cache_tools_list=True
        ) as calculator,
    ):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = agents.Agent(name="calculator", model=model, mcp_servers=[calculator])
        try:
            made = await agents.Runner.run(agent, list(messages), max_turns=MOST_TURNS)  # type: ignore[bad-argument-type]
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            return ""
    return str(made.final_output)


def connections(headers: Any = None, timeout: Any = 600.0, auth: Any = None) -> httpx2.AsyncClient:
    """The connections of one conversation."""
    return httpx2.AsyncClient(headers=headers, timeout=timeout, auth=auth, verify=_certificates())


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes 0.1 s, which each client would spend again."""
    return ssl.create_default_context()


class _Server:
    """The MCP server of this process: one for all conversations, started by the first, and again after its death."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self.process: Process | None = None
        self._url = ""

    async def url(self) -> str:
        """The address of the running server."""
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                command = (sys.executable, "-m", "apps.agent.adder")
                self.process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
                assert self.process.stdout is not None
                self._url = (await self.process.stdout.readline()).decode().strip()
                if not self._url:
                    raise RuntimeError(f"the MCP server ended with {await self.process.wait()} before it listened")
        return self._url

    async def close(self) -> None:
        """End it."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


SERVER = _Server()

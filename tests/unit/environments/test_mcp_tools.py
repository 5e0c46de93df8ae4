"""The tools of a real MCP server, `servers/tools.py`, over stdio and streamable HTTP."""

import asyncio
import os
import signal

import pytest

from goaly.base.telemetry.metrics import counting
from goaly.environments.mcp_tools import McpTools
from goaly.environments.protocol import Disconnected, EnvironmentDied
from goaly.environments.server_process import ServerProcess
from goaly.prompts.prompt import Message


def calls(*named: tuple[str, object]) -> Message:
    made = (
        {"id": f"call_{i}", "function": {"name": name, "arguments": given}} for i, (name, given) in enumerate(named)
    )
    return Message(role="assistant", tool_calls=tuple(made))


@pytest.mark.parametrize("arguments", [[], ["{fd}"]], ids=["stdio", "streamable HTTP"])
async def test_each_call_gets_one_message_also_if_it_is_wrong_or_fails(command, arguments, ends):
    tools = await McpTools.start(command("tools.py", *arguments))
    add = tools.tools[0]["function"]
    assert (add["name"], add["description"]) == ("add", "The sum of two numbers.")
    assert add["parameters"]["required"] == ["a", "b"]
    message = calls(
        ("add", '{"a": 1, "b": 2}'),
        ("add", {"a": 3, "b": 4}),
        ("subtract", "{}"),
        ("add", '{"a": 1,'),
        ("add", '{"a": ' + "[" * 5000),
        ("add", "[1, 2]"),
        ("add", '{"a": "one", "b": 2}'),
        ("divide", '{"a": 1, "b": 0}'),
    )
    with counting() as counts:
        answers = await tools.answer(message)
    assert [answer.role for answer in answers] == ["tool"] * 8
    assert [answer.tool_call_id for answer in answers] == [f"call_{i}" for i in range(8)]
    said = [answer.content for answer in answers]
    assert said[:2] == ["3", "7"]
    for text, part in zip(
        said[2:],
        [
            "there is no tool subtract",
            "are not JSON",
            "are not JSON",
            "must be a JSON object",
            "valid integer",
            "Error executing tool",
        ],
        strict=True,
    ):
        assert text.startswith("Error: ")
        assert part in text
    assert counts == {"tools/calls": 8, "tools/unknown": 1, "tools/malformed": 3, "tools/failed": 2}

    ends.watch(*map(int, (await tools.call("process_ids", {})).split()))
    assert tools.alive
    await tools.close()
    assert ends.wait(0), "the server's child too, which left its session"
    assert not tools.alive
    with pytest.raises(Disconnected):
        await tools.call("add", {"a": 1, "b": 2})


async def test_a_slow_tool_is_a_message_and_a_server_that_hangs_does_not_count_as_alive(command, ends):
    tools = await McpTools.start(command("tools.py"))
    tools.call_seconds = 0.2
    (answer,) = await tools.answer(calls(("wait_forever", "{}")))
    assert answer.content == "Error: wait_forever has not answered within 0.2 s"
    assert not tools.alive, "until it answers"
    tools.call_seconds = 30
    server, child = map(int, (await tools.call("process_ids", {})).split())
    ends.watch(server, child)
    assert tools.alive
    os.kill(server, signal.SIGSTOP)
    tools.call_seconds = 0.2
    with counting() as counts:
        slow = await tools.answer(calls(("add", '{"a": 1, "b": 2}'), ("divide", '{"a": 1, "b": 2}')))
    assert [message.content for message in slow] == [
        "Error: add has not answered within 0.2 s",
        "Error: divide has not answered within 0.2 s",
    ]
    assert counts == {"tools/calls": 2, "tools/timeouts": 2}
    assert not tools.alive
    await tools.close()
    assert ends.wait(0)


async def test_a_server_that_dies_during_a_call_fails_the_episode(command):
    for server in (command("tools.py"), await ServerProcess.start(command("tools.py", "{fd}"))):
        tools = await McpTools.start(server)
        with counting() as counts:
            with pytest.raises(EnvironmentDied, match=r"(?s)exit code 3.*I was told to end"):
                await tools.answer(calls(("end", '{"code": 3}')))
            assert not tools.alive
            with pytest.raises(EnvironmentDied):
                await tools.answer(calls(("add", '{"a": 1, "b": 2}')))
        assert counts == {"tools/calls": 2, "tools/deaths": 2}
        await tools.close()


async def test_a_long_result_is_cut_with_a_mark_that_the_policy_sees(command):
    tools = await McpTools.start(command("tools.py"), result_characters=4)
    message = calls(("add", '{"a": 1000, "b": 234}'), ("add", '{"a": 1234567, "b": 0}'), ("subtract", "{}"))
    with counting() as counts:
        said = [answer.content for answer in await tools.answer(message)]
    assert said[:2] == ["1234", "1234\n[cut off: 3 more characters]"]
    assert said[2].startswith("Erro\n[cut off: ")
    assert counts == {"tools/calls": 3, "tools/unknown": 1, "tools/cut": 2}
    assert await tools.call("add", {"a": 1234567, "b": 0}) == "1234567", "a script gets all of it"
    tools.result_characters = None
    assert [answer.content for answer in await tools.answer(calls(("add", '{"a": 1234567, "b": 0}')))] == ["1234567"]
    await tools.close()


async def test_a_result_that_is_too_large_fails_the_episode(command, monkeypatch):
    monkeypatch.setattr("goaly.environments.server_process._LINE_BYTES", 1 << 12)
    tools = await McpTools.start(command("tools.py"))
    assert await tools.call("add", {"a": 10**1000, "b": 1})
    with pytest.raises(Disconnected):
        await tools.call("add", {"a": 10**4200, "b": 1})
    assert not tools.alive
    await tools.close()


async def test_calls_that_are_cancelled_or_lose_their_connection_are_counted(command):
    tools = await McpTools.start(command("tools.py"))
    with counting() as counts:
        waiting = asyncio.create_task(tools.answer(calls(("wait_forever", "{}"), ("wait_forever", "{}"))))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await tools.close()
        with pytest.raises(Disconnected):
            await tools.answer(calls(("add", "{}")))
    assert counts == {"tools/calls": 3, "tools/cancelled": 2, "tools/disconnected": 1}


async def test_a_program_that_is_no_mcp_server_is_an_error(command):
    with pytest.raises((EnvironmentDied, Disconnected)):
        await McpTools.start(command("no_such_file.py"))
    with pytest.raises(Disconnected, match="MCP server"):
        await McpTools.start("http://127.0.0.1:1")

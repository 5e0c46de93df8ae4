"""Requests and responses have the format of their API: parameters, fields without values, and errors."""

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_sessions import MALFORMED
from anthropic.types import Message, RawMessageStreamEvent
from http_sessions import QUESTION, Serve, of_anthropic, of_openai, wrote
from pydantic import TypeAdapter

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = {"id": "", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
NAMES = ("add", "search")
TOOLS: Any = [{"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}} for name in NAMES]
ADD: Any = {"type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}


async def test_a_thinking_budget_of_anthropics_api_has_no_effect(serve: Serve) -> None:
    with serve(wrote("5", "so"), wrote("5", "so")) as served:
        client, thinking = of_anthropic(served).messages, {"type": "enabled", "budget_tokens": 1024}
        asked: Any = {"model": "m", "messages": [QUESTION], "thinking": thinking}
        made = await client.create(max_tokens=2000, **asked)
        async with client.stream(max_tokens=2000, **asked) as stream:
            streamed = await stream.get_final_message()
        counted = await client.count_tokens(**asked)
        assert [block.type for block in made.content] == [block.type for block in streamed.content]
        assert [block.type for block in made.content] == ["thinking", "text"]
        assert (
            counted.input_tokens
            == made.usage.input_tokens
            == (await client.count_tokens(**{**asked, "thinking": {"type": "adaptive"}})).input_tokens
        )
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens must be less than max_tokens"):
            await client.create(max_tokens=1000, **asked)


async def test_the_responses_api_calls_allowed_tools_only_and_its_prompt_has_all(serve: Serve) -> None:
    with serve(
        wrote("", "x", CALL), wrote("", "x", {**CALL, "function": {"name": "search", "arguments": "{}"}})
    ) as served:
        create = of_openai(served).responses.create
        asked: Any = {"model": "m", "input": "2+3?", "tools": TOOLS, "max_tool_calls": 3}
        first = await create(**asked, tool_choice={**ADD, "mode": "auto"})
        await create(**asked, tool_choice={**ADD, "mode": "auto"})
        await create(**asked, tool_choice={**ADD, "mode": "required"})
        assert [item.name for item in first.output if item.type == "function_call"] == ["add"]
        assert [turn.malformed for turn in served.session.turns] == [0, 1, 1], "the last one has no call"
        free, _, forced = served.scripted.asked
        assert free.structured_outputs is None
        assert [name in json.dumps(forced.structured_outputs) for name in NAMES] == [True, False]
        await create(**{**asked, "max_tool_calls": None})
        assert len({tuple(prompt) for prompt in served.scripted.prompts}) == 1
        none: Any = {"type": "allowed_tools", "mode": "required", "tools": []}
        with pytest.raises(openai.BadRequestError, match="must be auto or none without tools"):
            await create(**asked, tool_choice=none)


async def test_tools_without_a_description_and_parameters_are_rendered_as_vllm_does(serve: Serve) -> None:
    with serve() as served:
        bare: Any = [{"type": "function", "function": {"name": "add"}}]
        await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], tools=bare)
        text = served.session._chat.decode(served.scripted.prompts[0], skip_special_tokens=False)
        assert '{"name": "add", "description": null, "parameters": null}' in text


def values(read: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Each value, with the keys that lead to it."""
    yield at, read
    for key, inner in read.items() if isinstance(read, dict) else enumerate(read) if isinstance(read, list) else ():
        yield from values(inner, f"{at}.{key}")


@pytest.mark.parametrize("text", [wrote("let me add", "hm", CALL), MALFORMED["arguments that are no object"], ""])
async def test_answers_of_anthropics_api_have_its_fields_and_no_others(serve: Serve, text: str) -> None:
    with serve(text, text) as served:
        asked: Any = {"model": "m", "max_tokens": 200, "messages": [QUESTION]}
        asked["tools"] = [{"name": "add", "input_schema": {"type": "object"}}]
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            whole = (await client.post(f"{served.endpoint.base_url}/messages", json=asked)).json()
            stream = (await client.post(f"{served.endpoint.base_url}/messages", json={**asked, "stream": True})).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    for read in [whole, *events]:
        absent = {at.rpartition(".")[2] for at, value in values(read) if value is None and ".input." not in at}
        assert absent <= {"stop_reason", "stop_sequence"}, read
    assert {"stop_reason", "stop_sequence"} <= whole.keys() <= set(Message.model_fields)
    message = TypeAdapter(Message).validate_python(whole)
    for block, read in zip(message.content, whole["content"], strict=True):
        assert read.keys() <= set(type(block).model_fields)
    for event in events:
        read = TypeAdapter(RawMessageStreamEvent).validate_python(event)
        assert event.keys() <= set(type(read).model_fields)
        if read.type == "content_block_start":
            assert event["content_block"].keys() <= set(type(read.content_block).model_fields)
    calls = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert calls == ([{"a": None}] if "null" in text else [{"malformed_arguments": "[2]"}] if text else [])


BODY = {"model": "m", "messages": [QUESTION], "max_tokens": 50}
JSON = {"content-type": "application/json"}
ITEM = {"type": "message", "role": "assistant", "content": [], "id": "x", "status": "completed"}


@pytest.mark.parametrize(
    ("sent", "status", "code", "kind", "message"),
    [
        ({"method": "GET"}, 405, "method_not_allowed", "invalid_request_error", "GET: must be POST for this route"),
        ({"url": "/nothing", "json": BODY}, 404, "no_such_route", "not_found_error", "there is no such route"),
        (
            {"content": gzip.compress(json.dumps(BODY).encode()), "headers": {**JSON, "content-encoding": "gzip"}},
            *(415, "unsupported_media_type", "invalid_request_error", "content-encoding=gzip: "),
        ),
        ({"content": json.dumps(BODY)}, 415, "unsupported_media_type", "invalid_request_error", "application/json"),
        ({"content": "{", "headers": JSON}, 400, "invalid_request", "invalid_request_error", "the body must be JSON"),
        ({"content": b'{"\xff"}', "headers": JSON}, 400, "invalid_request", "invalid_request_error", "in UTF-8"),
        (
            {"json": {**BODY, "messages": "x"}},
            400,
            "invalid_request",
            "invalid_request_error",
            "messages: Input should",
        ),
        (
            {"json": {**BODY, "messages": [1]}},
            400,
            "invalid_request",
            "invalid_request_error",
            "messages.0: Input should",
        ),
        ({"json": BODY, "headers": {"authorization": ""}}, 401, "invalid_api_key", "authentication_error", "names no"),
        ({"json": {**BODY, "temperature": -1}}, 400, "invalid_request", "invalid_request_error", "temperature must be"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_each_error_has_the_status_code_and_type_of_its_kind(
    serve: Serve, path: str, sent: dict[str, Any], status: int, code: str, kind: str, message: str
) -> None:
    with serve() as served:
        headers = {"authorization": f"Bearer {served.endpoint.api_key}", **sent.get("headers", {})}
        url = f"{served.endpoint.base_url}/{path}{sent.get('url', '')}"
        async with httpx.AsyncClient() as client:
            response = await client.request(**{"method": "POST", **sent, "url": url, "headers": headers})
        assert served.scripted.prompts == []
    error = response.json()["error"]
    assert response.status_code == status
    assert message in error["message"]
    assert "parameter=" not in error["message"]
    if path == "messages":
        assert (response.json()["type"], error.keys(), error["type"]) == ("error", {"type", "message"}, kind)
    else:
        assert (error["code"], error["type"]) == (code, "invalid_request_error")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"input": [ITEM]}, "the request can't be read: one of its values is not complete, or too large"),
        ({"input": "hi", "background": True}, "background=True: this endpoint has no such parameter"),
        (
            {"input": "hi", "tools": TOOLS, "tool_choice": {"type": "custom", "name": "add"}},
            "tool_choice={'name': 'add', 'type': 'custom'}: must be auto, none, required or a function",
        ),
        ({"input": "hi", "logit_bias": {"x": 1}}, "logit_bias: must have ids of tokens as keys"),
    ],
)
async def test_a_refusal_shows_no_internals(serve: Serve, sent: dict[str, Any], message: str) -> None:
    with serve() as served, pytest.raises(openai.BadRequestError) as error:
        await of_openai(served).responses.create(model="m", extra_body=sent)
    assert error.value.body["message"] == message


@pytest.mark.parametrize("part", [[1], "text", {"type": "text"}, {"type": "bogus", "text": "hi"}])
async def test_a_part_that_is_not_complete_is_refused_without_internals(serve: Serve, part: Any) -> None:
    messages: Any = [{"role": "user", "content": [part]}]
    with serve() as served, pytest.raises(openai.BadRequestError) as error:
        await of_openai(served).chat.completions.create(model="m", messages=messages)
    expected = "messages: each part of a content must be an object with type text and its text: [^\\n]{9,60}"
    assert re.fullmatch(expected, error.value.body["message"])
    assert error.value.param == "messages"


async def test_a_failure_of_the_endpoint_shows_no_internals(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as served:
        served.scripted.breaks = RuntimeError("a secret")
        with pytest.raises(openai.InternalServerError) as error:
            await of_openai(served, max_retries=0).chat.completions.create(model="m", messages=[QUESTION])
    assert error.value.body == {
        "message": "the endpoint failed: RuntimeError",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }

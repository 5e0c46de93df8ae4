"""Streams of real clients: what is sampled arrives before the answer ends, and is what the session records."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_sessions import TOOLS
from http_sessions import QUESTION, Serve, Served, of_anthropic, of_openai, wrote

from goaly.base.errors import AnswerBroken

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = {"id": "", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2, "b": 3})}}
ANSWER = "the sum is five"
Texts = AsyncGenerator[str]


async def chat(served: Served, **facts: Any) -> Texts:
    """The text of a streamed chat."""
    asked: Any = {"model": "m", "messages": [QUESTION], **facts}
    async with await of_openai(served, max_retries=0).chat.completions.create(**asked, stream=True) as stream:
        async for part in stream:
            yield part.choices[0].delta.content or ""


async def completion(served: Served) -> Texts:
    """A streamed continuation of a text."""
    async for part in await of_openai(served).completions.create(model="m", prompt="2+3", max_tokens=99, stream=True):
        yield part.choices[0].text


async def response(served: Served) -> Texts:
    """The text of a streamed response."""
    async for event in await of_openai(served).responses.create(model="m", input="2+3?", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


async def message(served: Served) -> Texts:
    """The text of a streamed message of Anthropic's API."""
    async with of_anthropic(served).messages.stream(model="m", max_tokens=99, messages=[QUESTION]) as stream:
        async for text in stream.text_stream:
            yield text


async def first_text(texts: Texts) -> str:
    async for text in texts:
        if text:
            return text
    raise AssertionError("no text")


async def rest(texts: Texts) -> str:
    return "".join([text async for text in texts])


@pytest.mark.parametrize("ask", [chat, completion, response, message])
async def test_the_first_words_arrive_while_the_policy_writes_and_all_are_those_of_the_answer(
    serve: Serve, ask: Callable[[Served], Texts]
) -> None:
    with serve(ANSWER if ask is completion else wrote(ANSWER, "hm")) as served:
        served.scripted.shows, served.scripted.go_on = 12, asyncio.Event()
        texts = ask(served)
        first = await first_text(texts)
        assert served.session.turns == []  # the policy waits in the middle of its answer
        served.scripted.go_on.set()
        text = first + await rest(texts)
        (turn,) = served.session.turns
        assert text == turn.message["content"]
        assert text.strip() == ANSWER
        assert len(first) < len(text)


async def test_reasoning_and_text_arrive_at_once_and_calls_when_they_are_whole(serve: Serve) -> None:
    with serve(wrote("let me add", "hm, so", CALL)) as served:
        served.scripted.shows, served.scripted.go_on = 70, asyncio.Event()
        asked: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "logprobs": True}
        stream = await of_openai(served).chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        reasoning, content, logprobs, calls = "", "", [], []
        async for part in stream:
            for choice in part.choices:
                delta: Any = choice.delta
                reasoning += getattr(delta, "reasoning", None) or ""
                content += delta.content or ""
                calls += delta.tool_calls or ()
                logprobs += (choice.logprobs and choice.logprobs.content) or ()
            if content.strip() == "let me add":
                assert reasoning.strip() == "hm, so"
                assert served.scripted.go_on.is_set() or calls == []
                served.scripted.go_on.set()
            usage = part.usage
        (turn,) = served.session.turns
        assert (reasoning, content) == (turn.message["reasoning_content"], turn.message["content"])
        assert [call.id for call in calls] == [call["id"] for call in turn.message["tool_calls"]]
        assert [logprob.logprob for logprob in logprobs] == turn.logprobs.tolist()
        assert usage.completion_tokens == len(turn.tokens)


async def chat_calls(served: Served) -> list[tuple[str, str]]:
    """The calls of a streamed chat, of the parts that OpenAI's client adds up."""
    asked: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS}
    async with of_openai(served).chat.completions.stream(**asked) as stream:
        whole = await stream.get_final_completion()
    return [(call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls]


async def response_calls(served: Served) -> list[tuple[str, str]]:
    """The calls of a streamed response."""
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    async with of_openai(served).responses.stream(model="m", input="2+3?", tools=tools) as stream:
        whole = await stream.get_final_response()
    return [(one.name, one.arguments) for one in whole.output if one.type == "function_call"]


async def message_calls(served: Served) -> list[tuple[str, str]]:
    """The calls of a streamed message of Anthropic's API."""
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    asked: Any = {"model": "m", "max_tokens": 400, "messages": [QUESTION], "tools": tools}
    async with of_anthropic(served).messages.stream(**asked) as stream:
        whole = await stream.get_final_message()
    assert whole.stop_reason == "tool_use"
    return [(one.name, json.dumps(one.input)) for one in whole.content if one.type == "tool_use"]


@pytest.mark.parametrize("calls_of", [chat_calls, response_calls, message_calls])
async def test_parallel_calls_of_a_stream_are_whole_and_apart(
    serve: Serve, calls_of: Callable[[Served], Awaitable[list[tuple[str, str]]]]
) -> None:
    other = {"id": "", "type": "function", "function": {"name": "search", "arguments": json.dumps({"for": "x"})}}
    with serve(wrote("both", "hm", CALL, other)) as served:
        named = [(name, json.loads(arguments)) for name, arguments in await calls_of(served)]
        assert named == [("add", {"a": 2, "b": 3}), ("search", {"for": "x"})]
        (turn,) = served.session.turns
        assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["add", "search"]


async def test_each_of_several_streamed_answers_is_whole(serve: Serve) -> None:
    with serve(*(wrote(f"answer {number}", "x") for number in range(3))) as served:
        texts = ["", "", ""]
        asked: Any = {"model": "m", "messages": [QUESTION], "n": 3}
        async for part in await of_openai(served).chat.completions.create(**asked, stream=True):
            texts[part.choices[0].index] += part.choices[0].delta.content or ""
        assert texts == [turn.message["content"] for turn in served.session.turns]


async def test_a_retry_joins_the_stream_from_its_beginning_and_gets_its_end(serve: Serve) -> None:  # agents-6
    with serve(wrote(ANSWER, "hm"), wrote("another", "hm")) as served:
        served.scripted.shows, served.scripted.go_on = 12, asyncio.Event()
        named: Any = {"extra_headers": {"idempotency-key": "k"}}
        first, retry = chat(served, **named), chat(served, **named)
        begun = await first_text(first)
        again = await first_text(retry)
        assert again.startswith(begun)
        await first.aclose()  # the client that came first goes away
        served.scripted.go_on.set()
        text = again + await rest(retry)
        late = await rest(chat(served, **named))
        assert text == late == served.session.turns[0].message["content"]
        assert len(served.session.turns) == len(served.scripted.prompts) == 1


async def test_a_client_that_goes_away_amid_a_stream_has_its_request_cancelled(serve: Serve) -> None:
    with serve(wrote(ANSWER, "hm"), wrote("another", "hm")) as served:
        served.scripted.shows, served.scripted.go_on = 12, asyncio.Event()
        texts = chat(served)
        await first_text(texts)
        await texts.aclose()
        await served.scripted.cancelled.wait()
        assert served.session.turns == []
        served.scripted.go_on = None
        assert (await rest(chat(served))).strip() == "another"


async def test_a_stream_whose_answer_cannot_go_on_ends_with_an_error_and_a_repeat_is_sampled_again(
    serve: Serve,
) -> None:  # generate-12
    for ask, kinds in ((chat, openai.APIError), (response, openai.APIError), (message, anthropic.APIStatusError)):
        with serve(wrote(ANSWER, "hm"), wrote("another", "hm")) as served:
            served.scripted.shows, served.scripted.breaks = 12, AnswerBroken("its generator died")
            texts = ask(served)
            assert await first_text(texts)
            with pytest.raises(kinds, match="its generator died"):
                await rest(texts)
            assert served.session.turns == []
            served.scripted.breaks = None
            assert (await rest(ask(served))).strip() == "another"


@pytest.mark.parametrize(
    ("path", "limit", "silence"),
    [("chat/completions", "max_tokens", ": keep-alive"), ("messages", "max_tokens", 'data: {"type": "ping"}')],
)
async def test_a_silent_stream_is_kept_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, limit: str, silence: str
) -> None:
    monkeypatch.setattr("goaly.agents.event_streams.KEEP_ALIVE_SECONDS", 0.01)
    with serve(wrote(ANSWER, "hm")) as served:
        served.scripted.go_on = asyncio.Event()
        body: Any = {"model": "m", "messages": [QUESTION], "stream": True, limit: 99}
        headers, lines = {"x-api-key": served.endpoint.api_key}, []
        async with (
            httpx.AsyncClient(headers=headers) as client,
            client.stream("POST", f"{served.endpoint.base_url}/{path}", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(silence) == 3 and not served.scripted.go_on.is_set():
                    assert "the" not in "".join(lines)
                    served.scripted.go_on.set()
        assert lines.count(silence) >= 3
        assert any("[DONE]" in line or "message_stop" in line for line in lines)
    monkeypatch.setattr("goaly.agents.event_streams.KEEP_ALIVE_SECONDS", 0.001)
    for ask in (chat, completion, response, message):
        with serve(*[ANSWER if ask is completion else wrote(ANSWER, "hm")]) as served:
            assert (await rest(ask(served))).strip() == ANSWER

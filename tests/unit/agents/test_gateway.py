"""Real clients of OpenAI's and Anthropic's APIs at the endpoint get what their session records."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from agent_sessions import MALFORMED, PENALTY, TOOLS
from http_sessions import QUESTION, Serve, Served, of_anthropic, of_openai, serving, started, wrote

from goaly.agents.gateway import REOPEN_SECONDS, Gateway
from goaly.agents.refusals import Refusal
from goaly.agents.session_files import SessionFiles, forget_group, forget_sessions
from goaly.agents.settings import EndpointSettings, SessionSettings, UntrainedSettings
from goaly.generate.request import seed_of
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}
CALL = {"id": "", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2, "b": 3})}}


async def test_a_chat_with_tools_is_one_trajectory(serve: Serve) -> None:
    with serve(wrote("let me add", "hm", CALL), wrote("it is 5", "so")) as served:
        client = of_openai(served)
        said: list[Any] = [QUESTION]
        first = await client.chat.completions.create(model="gpt-4o", messages=said, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        said += [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        second = await client.chat.completions.create(model="gpt-4o", messages=said, tools=TOOLS)
        assert second.choices[0].message.content.strip() == "it is 5"
        assert second.choices[0].finish_reason == "stop"
        assert second.usage.prompt_tokens == len(served.scripted.prompts[1])
        assert second.usage.completion_tokens == len(served.session.turns[1].tokens)
        assert second.id != first.id
        (trajectory,) = served.session.trajectories(1.0)
        assert trajectory.tokens["trained"].sum() == sum(len(turn.tokens) for turn in served.session.turns)


async def test_the_responses_api_continues_from_its_items_and_from_an_id(serve: Serve) -> None:
    with serve(wrote("let me add", "hm", CALL), wrote("it is 5", "so"), wrote("bye", "x")) as served:
        client = of_openai(served)
        tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
        said: list[Any] = [QUESTION]
        first = await client.responses.create(model="m", input=said, tools=tools, instructions="be short")
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
        said += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        second = await client.responses.create(model="m", input=said, tools=tools, instructions="be short")
        assert second.output_text.strip() == "it is 5"
        async with client.responses.stream(
            model="m", previous_response_id=second.id, input="thanks", tools=tools, instructions="be short"
        ) as stream:
            third = await stream.get_final_response()
        assert third.output_text.strip() == "bye"
        parents = [turn.parent and turn.parent.number for turn in served.session.turns]
        assert parents[:2] == [None, 0]
        messages = served.session.turns[2].request.messages
        assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_anthropics_messages_continue_with_tools_in_full_and_in_streams(serve: Serve) -> None:
    with serve(wrote("let me add", "hm", CALL), wrote("it is 5", "so")) as served:
        client = of_anthropic(served)
        tools: Any = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
        said: list[Any] = [QUESTION]
        facts: Any = {"model": "claude", "max_tokens": 100, "tools": tools}
        counted = await client.messages.count_tokens(model="claude", messages=said, tools=tools)
        first = await client.messages.create(messages=said, **facts)
        assert first.stop_reason == "tool_use"
        assert counted.input_tokens == first.usage.input_tokens
        (call,) = [block for block in first.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("add", {"a": 2, "b": 3})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=said, **facts) as stream:
            second = await stream.get_final_message()
        assert [block.type for block in second.content] == ["thinking", "text"]
        assert second.content[1].text.strip() == "it is 5"
        assert served.session.turns[1].parent is served.session.turns[0]


@pytest.mark.parametrize("what", MALFORMED)
async def test_malformed_calls_are_returned_by_every_api(serve: Serve, what: str) -> None:
    with serve(MALFORMED[what], MALFORMED[what], MALFORMED[what]) as served:
        tool: Any = {"name": "add", "parameters": {"type": "object", "properties": {}}}
        whole = await of_openai(served).chat.completions.create(
            model="m", messages=[QUESTION], tools=[{"type": "function", "function": tool}]
        )
        said = whole.choices[0].message
        answered = await of_openai(served).responses.create(
            model="m", input="2+3?", tools=[{"type": "function", "strict": False, **tool}]
        )
        message = await of_anthropic(served).messages.create(
            model="m",
            max_tokens=100,
            messages=[QUESTION],
            tools=[{"name": "add", "input_schema": tool["parameters"]}],
        )
        assert answered.status == "completed"
        (block,) = message.content
        assert [block.type == "tool_use", answered.output[0].type == "function_call"] == [bool(said.tool_calls)] * 2
        if what == "arguments that are no object":
            assert block.input == {"malformed_arguments": "[2]"}
        assert served.session.malformed_calls == 3


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_of_anthropics_api_goes_on_after_a_call_whose_arguments_are_no_object(
    serve: Serve, streams: bool
) -> None:
    with serve(MALFORMED["arguments that are no object"], wrote("5", "so")) as served:
        client, facts = of_anthropic(served).messages, {"model": "m", "max_tokens": 100}
        facts["tools"] = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
        said: list[Any] = [QUESTION]
        if streams:
            async with client.stream(messages=said, **facts) as stream:
                made = await stream.get_final_message()
        else:
            made = await client.create(messages=said, **facts)
        (block,) = [block for block in made.content if block.type == "tool_use"]
        assert block.input == {"malformed_arguments": "[2]"}
        said.append({"role": "assistant", "content": [block.model_dump() for block in made.content]})
        error = {"type": "tool_result", "tool_use_id": block.id, "content": "no object", "is_error": True}
        said.append({"role": "user", "content": [error]})
        await client.create(messages=said, **facts)
        first, second = served.session.turns
        assert second.parent is first


async def test_completions_continue_texts_and_tokens(serve: Serve) -> None:
    with serve("q r", "de", "fg") as served:
        client = of_openai(served)
        first = await client.completions.create(model="m", prompt="a", max_tokens=2)
        assert first.choices[0].finish_reason == "length"
        assert first.choices[0].text == "q "
        tokens = [*served.session.turns[0].path_tokens()]
        await client.completions.create(model="m", prompt="aq " + "and ", max_tokens=2, logprobs=0)
        with pytest.raises(openai.BadRequestError, match="logprobs=5: must be 0 or 1"):
            await client.completions.create(model="m", prompt="x", logprobs=5)
        await client.completions.create(model="m", prompt=[*tokens, 7], max_tokens=2)
        assert [turn.parent and turn.parent.number for turn in served.session.turns] == [None, 0, 0]
        assert served.scripted.prompts[1][: len(tokens)] == tokens


async def test_each_of_several_answers_is_a_sample_of_its_own(serve: Serve) -> None:
    with serve(*(wrote(f"answer {number}", "x") for number in range(3))) as served:
        client = of_openai(served)
        made = await client.chat.completions.create(model="m", messages=[QUESTION], n=3, seed=5, logprobs=True)
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in made.choices}) == 3
        first = seed_of("5.7.0")  # an agent has the same seed in all episodes of a group
        assert [asked.seed for asked in served.scripted.asked] == [first, first + 1, first + 2]
        for choice, turn in zip(made.choices, served.session.turns, strict=True):
            assert [part.logprob for part in choice.logprobs.content] == turn.logprobs.tolist()
        assert len(served.session.trajectories(0.0)) == 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"messages": "no list"}, "invalid_request"),
        ({"tool_choice": "required"}, "invalid_request"),
        ({"response_format": {"type": "json_schema"}}, "invalid_request"),
        ({"top_logprobs": 3, "logprobs": True}, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "invalid_request",
        ),
        ({"stop": ["\ud800"]}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_request"),
        ({"stop_token_ids": [-1]}, "invalid_request"),
        ({"n": 0}, "invalid_request"),
    ],
)
async def test_an_impossible_request_is_the_clients_error(
    serve: Serve, change: dict[str, Any], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve() as served:
        body = {"model": "m", "messages": [QUESTION], **change}
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            url, sent = f"{served.endpoint.base_url}/chat/completions", json.dumps(body)
            response = await client.post(url, content=sent, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "Exception in ASGI application" not in caplog.text  # its connection stays open
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == code
        assert served.scripted.prompts == []


async def test_a_count_of_retries_that_is_no_number_is_the_clients_error(serve: Serve) -> None:
    headers = {"x-stainless-retry-count": "9" * 5000}
    with serve() as served, pytest.raises(openai.BadRequestError) as error:
        await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], extra_headers=headers)
    assert error.value.code == "invalid_header"


async def test_no_key_reaches_a_session_that_is_not_its_own(serve: Serve) -> None:  # agents-8
    with serve() as one, serve() as other:
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=one.endpoint.base_url, api_key="x").models.list()
        client = anthropic.AsyncAnthropic(base_url=one.endpoint.root_url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="m", max_tokens=5, messages=[QUESTION])
        made = await of_openai(one).responses.create(model="m", input="hi")
        with pytest.raises(openai.NotFoundError):
            await of_openai(other).responses.create(model="m", input="go on", previous_response_id=made.id)
    with pytest.raises(openai.AuthenticationError):
        await of_openai(one).models.list()


async def test_the_listed_model_has_the_context_of_the_session_and_not_the_longest_one(serve: Serve) -> None:
    with serve(max_context=512) as served:
        (model,) = (await of_openai(served).models.list()).data
        assert model.model_dump()["max_model_len"] == 512


async def test_limits_are_errors_that_clients_know(serve: Serve) -> None:
    with serve(limits=SessionSettings(turns=1)) as served:
        client = of_openai(served, max_retries=0)
        await client.chat.completions.create(model="m", messages=[QUESTION])
        with pytest.raises(openai.BadRequestError, match="the limit is 1") as error:
            await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
        assert error.value.code == "session_exhausted"
    with serve(limits=SessionSettings(parallel=1)) as served, pytest.raises(openai.RateLimitError):
        await of_openai(served, max_retries=0).chat.completions.create(model="m", messages=[QUESTION], n=2)
    with serve(limits=SessionSettings(tokens=4)) as served:
        made = await of_openai(served).chat.completions.create(model="m", messages=[QUESTION])
        assert (made.choices[0].finish_reason, made.usage.completion_tokens) == ("length", 4)


LONG: Any = {"role": "user", "content": "a1" * 2100}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_context", [4096, 20])  # that of the endpoint, and a shorter one of the policy
async def test_a_full_context_is_an_error_that_clients_of_each_api_know_and_marks_the_session(
    serve: Serve, stream: bool, max_context: int
) -> None:
    asked: dict[str, Any] = {
        "messages": lambda client: client.chat.completions.create(model="m", messages=[LONG], stream=stream),
        "prompt": lambda client: client.completions.create(model="m", prompt=LONG["content"], stream=stream),
        "input": lambda client: client.responses.create(model="m", input=LONG["content"], stream=stream),
    }
    for parameter, ask in asked.items():
        with serve(max_context=max_context) as served:
            with pytest.raises(openai.BadRequestError, match="leave no room in a context of") as error:
                await ask(of_openai(served))
            assert (error.value.code, error.value.param) == ("context_length_exceeded", parameter)
            assert error.value.type == "invalid_request_error"
            assert served.session.exhausted
    with serve(max_context=max_context) as served:
        client = of_anthropic(served)
        counted = await client.messages.count_tokens(model="claude", messages=[LONG])
        assert counted.input_tokens > max_context
        assert not served.session.exhausted
        said = f"prompt is too long: {counted.input_tokens} tokens > {max_context - 1} maximum"
        with pytest.raises(anthropic.BadRequestError, match=said) as error:
            await client.messages.create(model="claude", max_tokens=9, messages=[LONG], stream=stream)
        assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert served.session.exhausted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "a" * 200_000}]}),
        ("/responses", {"input": "a" * 200_000}),
        ("/completions", {"prompt": "a" * 200_000}),
        ("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a" * 200_000}]}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    serve: Serve, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTokenizer, "fewest_tokens", lambda _, text: len(text) // 16)
    with serve() as served:
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            response = await client.post(f"{served.endpoint.base_url}{path}", json={"model": "m", **body})
        assert response.status_code == 400
        assert re.search("prompt is too long: 1[0-9]{4} tokens", response.text), "the fewest; it has 200,000"
        assert served.session.exhausted


async def test_trained_answers_keep_the_runs_distribution_and_evaluations_have_the_clients(serve: Serve) -> None:
    for evaluation in (False, True):
        with serve(evaluation=evaluation) as served:
            facts: Any = {"model": "m", "messages": [QUESTION], "temperature": 0.5, "max_tokens": 7, "stop": ["!"]}
            await of_openai(served).chat.completions.create(**facts)
            (asked,) = served.scripted.asked
            assert asked.temperature == (0.5 if evaluation else 1.0)
            assert (asked.max_tokens, asked.stop) == (7, ("!",))


async def test_requests_that_a_rule_names_are_answered_and_recorded_but_not_trained(
    chats: dict[str, ChatTokenizer],
) -> None:
    untrained = UntrainedSettings(
        models=("*haiku*",), headers={"X-Purpose": "title"}, metadata={"purpose": "summary?", "user_id": "small"}
    )
    asked: Any = {"messages": [QUESTION], "temperature": 0.5, "max_tokens": 50}
    by_metadata, by_header = {"metadata": {"purpose": "summary1"}}, {"extra_headers": {"x-purpose": "title"}}
    async with started(chats["qwen3"], settings=EndpointSettings(untrained=untrained)) as (gateway, parser):
        with serving(gateway, chats["qwen3"], parser, MALFORMED["an unknown tool"], limits=PENALTY) as served:
            openai_client, claude = of_openai(served), of_anthropic(served).messages
            chat, texts = openai_client.chat.completions.create, openai_client.completions.create
            responses: Any = partial(openai_client.responses.create, input="hi", temperature=0.5)
            await chat(model="claude-haiku-4-5", tools=TOOLS, **asked)
            await chat(model="m", **asked, **by_header)
            await chat(model="m", **asked, **by_metadata)
            await responses(model="m", **by_metadata)
            await texts(model="haiku", prompt="2+3=", temperature=0.5)
            await claude.create(model="m", max_tokens=50, messages=[QUESTION], metadata={"user_id": "small"})
            async with claude.stream(model="a-haiku", max_tokens=50, messages=[QUESTION]) as stream:
                await stream.get_final_message()
            masked = len(served.session.turns)
            await chat(model="m", **asked, metadata={"purpose": "summary"}, extra_headers={"x-purpose": "titles"})
            await responses(model="claude-sonnet", metadata={"user_id": "smaller"})
            turns = served.session.turns
        assert [turn.trained for turn in turns] == [False] * masked + [True] * 2
        assert (masked, served.session.untrained_turns, served.session.malformed_calls) == (7, 7, 1)
        assert [one.temperature for one in served.scripted.asked] == [0.5] * 5 + [1.0] * 4, (
            "trained ones have the run's"
        )
        trajectories = served.session.trajectories(1.0)
        assert [one.trained_tokens for one in trajectories] == [len(turn.tokens) for turn in turns[-2:]]
        assert [one.reward for one in trajectories] == [1.0, 1.0]


async def test_an_untrained_request_that_does_not_fit_says_nothing_of_its_session(
    chats: dict[str, ChatTokenizer],
) -> None:
    untrained = EndpointSettings(untrained=UntrainedSettings(models=("side",)))
    async with started(chats["qwen3"], settings=untrained) as (gateway, parser):
        for model in ("side", "m"):
            with serving(gateway, chats["qwen3"], parser) as served:
                client = of_openai(served)
                await client.chat.completions.create(model="m", messages=[QUESTION])
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(model=model, messages=[LONG])
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model=model, prompt=LONG["content"])
                assert error.value.code == "context_length_exceeded"
                assert served.session.exhausted is (model == "m")


async def test_rewards_come_over_http_for_a_turn_or_for_the_episode(serve: Serve) -> None:
    with serve() as served:
        made = await of_openai(served).chat.completions.create(model="m", messages=[QUESTION])
        url = f"{served.endpoint.root_url}/sessions/{served.endpoint.session_id}/reward"
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as client:
            own = f"{served.endpoint.root_url}/sessions/own/reward"
            for at, reward in (
                (url, {"reward": 0.5, "response_id": made.id}),
                (url, {"reward": 1.0}),
                (own, {"reward": 0.25}),
            ):
                assert (await client.post(at, json=reward)).status_code == 204
            assert (await client.post(url, json={"reward": 1.0, "response_id": "x"})).status_code == 404
            assert (await client.post(f"{url[:-10]}other/reward", json={"reward": 1.0})).status_code == 404
            for wrong in ("NaN", "1e39"):
                assert (await client.post(url, content=f'{{"reward": {wrong}}}', headers=JSON)).status_code == 400
        (trajectory,) = served.session.trajectories()
        assert trajectory.reward == 1.75


async def test_a_body_that_does_not_come_is_the_clients_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goaly.agents.http_server.BODY_SECONDS", 0.2)
    with serve() as served:
        url, key = httpx.URL(served.endpoint.base_url), served.endpoint.api_key.encode()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        writer.write(head + b"authorization: Bearer %s\r\ncontent-length: 9\r\n\r\n{" % key)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        assert served.calls() == []


async def test_a_session_goes_on_in_the_next_worker(
    chats: dict[str, ChatTokenizer], tmp_path: Path
) -> None:  # agents-7
    files = SessionFiles(tmp_path / "sessions")
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]

    async def agent(served: Served) -> list[str]:
        """Everything that an agent does is the same in each attempt."""
        client = of_openai(served)
        one, other = [await client.chat.completions.create(model="m", messages=[QUESTION]) for _ in range(2)]
        said = [QUESTION, one.choices[0].message, {"role": "user", "content": "go on"}]
        more = await client.chat.completions.create(model="m", messages=said, n=2)
        call = await client.responses.create(model="m", input="hi", tools=tools)
        last = await client.responses.create(model="m", input="and", tools=tools, previous_response_id=call.id)
        url = f"{served.endpoint.root_url}/sessions/{served.endpoint.session_id}/reward"
        async with httpx.AsyncClient(headers={"x-api-key": served.endpoint.api_key}) as http:
            for reward in ({"reward": 1.0}, {"reward": 1.0}, {"reward": 0.5, "response_id": one.id}):
                assert (await http.post(url, json=reward)).status_code == 204
        texts = [choice.message.content for made in (one, other, more) for choice in made.choices]
        return [*texts, *(item.to_json() for item in call.output if item.type == "function_call"), last.output_text]

    texts = [wrote(f"answer {number}", "x", *([CALL] if number == 4 else [])) for number in range(6)]
    async with started(chats["qwen3"], files) as (gateway, parser):  # stands for all workers, which make the same keys
        serve = partial(serving, gateway, chats["qwen3"], parser)
        with serve(*texts, files=files) as served:
            first, whole = await agent(served), served.session
        path = tmp_path / "sessions" / "7.0.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        for kept in range(len(lines) + 1):
            path.write_bytes(b"".join(lines[:kept]) + b'{"kind": "turn", "par')
            with serve(*texts[min(kept, 6) :], files=files) as served:
                again = await agent(served)
                assert len(served.scripted.prompts) == 6 - min(kept, 6)
            assert [without_ids(one) for one in again] == [without_ids(one) for one in first]
            (*trajectories,) = served.session.trajectories()
            assert [one.tokens["tokens"].tolist() for one in trajectories] == [
                one.tokens["tokens"].tolist() for one in whole.trajectories()
            ]
            assert sum(one.reward for one in trajectories) == sum(one.reward for one in whole.trajectories())


async def test_a_request_to_the_next_worker_waits_for_its_session_and_no_other_does(
    chats: dict[str, ChatTokenizer], tmp_path: Path
) -> None:
    files = SessionFiles(tmp_path / "sessions")
    files.begin("7.0")
    files.begin("8.0")
    waits = asyncio.Event()

    class Awaited(asyncio.Event):
        async def wait(self) -> Literal[True]:
            waits.set()
            return await super().wait()

    async with started(chats["qwen3"], SessionFiles(tmp_path / "sessions")) as (gateway, parser):
        gateway._awaited[files.api_key("7.0")] = Awaited()
        url = gateway.url
        async with openai.AsyncOpenAI(base_url=url, api_key=files.api_key("9.0"), max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key=files.api_key("7.0"), max_retries=0) as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))
            await waits.wait()
            with serving(gateway, chats["qwen3"], parser, wrote("here", "x"), files=files):
                assert (await asked).choices[0].message.content.strip() == "here"
            with pytest.raises(openai.AuthenticationError):  # its session has ended here
                await client.models.list()
        assert list(gateway._awaited) == [files.api_key("8.0")]


async def test_a_request_whose_group_was_dropped_is_refused_at_once(
    chats: dict[str, ChatTokenizer], tmp_path: Path
) -> None:
    files = SessionFiles(tmp_path)
    files.begin("7.0")
    gateway = Gateway(EndpointSettings(), 0, str(chats["qwen3"].folder), 4096, files)
    forget_group(tmp_path, 7)
    with pytest.raises(Refusal, match="no session that is open"):
        await asyncio.wait_for(gateway.check(files.api_key("7.0"), {}), REOPEN_SECONDS / 2)
    assert gateway._awaited == {}


async def test_a_request_whose_session_does_not_go_on_in_time_is_told_to_ask_again(
    chats: dict[str, ChatTokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goaly.agents.gateway.REOPEN_SECONDS", 0.05)
    files = SessionFiles(tmp_path / "sessions")
    files.begin("7.0")
    async with started(chats["qwen3"], files) as (gateway, parser):
        facts: Any = {"base_url": gateway.url, "api_key": files.api_key("7.0")}
        async with openai.AsyncOpenAI(**facts, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="ask again"):
                await client.models.list()
            with serving(gateway, chats["qwen3"], parser, wrote("here", "x"), files=files):
                made = await client.chat.completions.create(model="m", messages=[QUESTION])
        assert made.choices[0].message.content.strip() == "here"


def without_ids(text: str) -> str:
    """A function call has a random id in each attempt that samples it."""
    return re.sub(r'"(chatcmpl-|fc_)[^"]*"', "", text)


async def test_what_an_episode_chatted_in_its_own_code_is_not_in_the_next_worker_and_all_else_is(
    tmp_path: Path,
) -> None:  # agents-7
    files = SessionFiles(tmp_path)
    told: list[dict[str, Any]] = [
        {"kind": "turn", "key": None, "parent": None},
        {"kind": "turn", "key": "a", "parent": None},
        {"kind": "turn", "key": "b", "parent": 0},  # goes on with what is not there
        {"kind": "turn", "key": "c", "parent": 1},
        {"kind": "credit", "key": "d", "turns": [3], "reward": 1.0},
        {"kind": "credit", "key": "e", "turns": [2, 3], "reward": 1.0},
        {"kind": "credit", "key": None, "turns": [3], "reward": 1.0},
        {"kind": "turn", "key": None, "parent": 3},
        {"kind": "turn", "key": "f", "parent": 3},  # was not the first after 3
        {"kind": "turn", "key": "g", "parent": None},
        {"kind": "refused", "by": "limits"},
        {"kind": "reward", "key": "h", "reward": 1.0},
        {"kind": "reward", "key": None, "reward": 1.0},
        {"kind": "end", "how": "abandoned"},
    ]
    for record in told:
        files.write("7.0", record)
    kept = [
        {"kind": "turn", "key": "a", "parent": None},
        {"kind": "turn", "key": "c", "parent": 0},
        {"kind": "credit", "key": "d", "turns": [1], "reward": 1.0},
        {"kind": "turn", "key": "g", "parent": None},
        {"kind": "reward", "key": "h", "reward": 1.0},
    ]
    assert files.records("7.0") == kept
    files.write("7.0", {"kind": "turn", "key": "i", "parent": 2})
    assert files.records("7.0") == [*kept, {"kind": "turn", "key": "i", "parent": 2}]


async def test_every_worker_makes_the_same_keys_and_no_other_run_does(tmp_path: Path) -> None:
    one, other, stranger = (SessionFiles(tmp_path / name) for name in ("run", "run", "other"))
    assert one.api_key("7.0") == other.api_key("7.0") != one.api_key("7.1")
    assert stranger.api_key("7.0") != one.api_key("7.0")
    assert (tmp_path / "run" / "secret").stat().st_mode & 0o77 == 0
    forget_sessions(tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_a_client_that_forbids_calls_gets_text_and_one_that_wants_a_single_call_gets_the_first(
    serve: Serve,
) -> None:
    other = {**CALL, "function": {"name": "search", "arguments": "{}"}}
    with serve(wrote("", "x", CALL), wrote("", "x", CALL, other)) as served:
        client = of_openai(served)
        asked: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS}
        forbidden = await client.chat.completions.create(**asked, tool_choice="none")
        single = await client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert forbidden.choices[0].message.tool_calls is None
    assert "<tool_call>" in forbidden.choices[0].message.content
    assert [call.function.name for call in single.choices[0].message.tool_calls] == ["add"]

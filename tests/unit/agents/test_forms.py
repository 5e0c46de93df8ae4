"""Requests that force a form on the answer: a schema, or a call of a tool."""

import json
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
import torch
from agent_sessions import TOOLS, assistant, tool
from http_sessions import QUESTION, Serve, Served, of_anthropic, of_openai, wrote
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.conversation import Conversation
from goaly.generate.grammars import refuse_slow
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
ANSWER = wrote('{"sum": 5}', "hm")
AFTER_REASONING = {"at_once": False, "template_args": {}}
TOOL = TOOLS[0]["function"]["name"]
CALL = {"id": "", "type": "function", "function": {"name": TOOL, "arguments": json.dumps({"a": 2, "b": 3})}}
CALLED = wrote("", "hm", CALL)


def asked(served: Served) -> Any:
    """The form that the policy was asked for, in the only request."""
    (sampling,) = served.scripted.asked
    assert sampling.temperature == 1.0
    return sampling.structured_outputs


async def completed(served: Served, facts: dict[str, Any], streams: bool) -> Any:
    """The chat completion, of a stream or not."""
    chats = of_openai(served).chat.completions
    if not streams:
        return await chats.create(**facts)
    async with chats.stream(**facts) as stream:
        return await stream.get_final_completion()


def assert_called(served: Served, name: str, arguments: str) -> None:
    """The client got the call of the only turn, which is of the forced tool."""
    (turn,) = served.session.turns
    (call,) = turn.message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (TOOL, {"a": 2, "b": 3})
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, json.loads(arguments))
    assert (turn.trained, served.session.untrained_turns, turn.malformed) == (True, 0, 0)


async def test_an_answer_of_a_form_is_trained_and_so_is_what_comes_after_it(serve: Serve) -> None:
    with serve(CALLED, wrote("it is 5", "so")) as served:
        client = of_openai(served)
        said: list[Any] = [QUESTION]
        made = await client.chat.completions.create(model="m", messages=said, tools=TOOLS, tool_choice="required")
        assert asked(served).keys() == {"structural_tag", *AFTER_REASONING}
        (call,) = list(made.choices[0].message.tool_calls or ())
        said += [made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        await client.chat.completions.create(model="m", messages=said, tools=TOOLS)
        first, second = served.session.turns
        assert second.parent is first
        assert served.scripted.asked[1].structured_outputs is None
        (trajectory,) = served.session.trajectories(1.0)
        assert trajectory.tokens["trained"].sum() == len(first.tokens) + len(second.tokens)


async def test_each_api_asks_for_a_form_in_its_own_words(serve: Serve) -> None:
    with serve(ANSWER) as served:
        made = await of_openai(served).chat.completions.create(
            model="m", messages=[QUESTION], response_format={"type": "json_object"}
        )
        assert json.loads(made.choices[0].message.content or "") == {"sum": 5}
        assert asked(served) == {"json_object": True, **AFTER_REASONING}
    with serve(ANSWER) as served:
        form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
        await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], response_format=form)
        assert asked(served) == {"json": SCHEMA, **AFTER_REASONING}
    with serve(ANSWER) as served:
        schema: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}
        answer = await of_openai(served).responses.create(model="m", input=[QUESTION], text=schema)
        assert json.loads(answer.output_text) == {"sum": 5}
        assert asked(served) == {"json": SCHEMA, **AFTER_REASONING}
    with serve("yes") as served:
        choice: Any = {"structured_outputs": {"choice": ["yes", "no"]}}
        text = await of_openai(served).completions.create(model="m", prompt="a", extra_body=choice)
        assert text.choices[0].text == "yes"
        assert asked(served) == {"choice": ["yes", "no"], "at_once": True}
        assert served.session.turns[0].trained
    with serve("any") as served:
        free: Any = {"type": "text"}
        await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], response_format=free)
        assert asked(served) is None
        assert served.session.turns[0].trained


@pytest.mark.parametrize("streams", [False, True])
async def test_some_tool_must_be_called(serve: Serve, streams: bool) -> None:
    facts: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "tool_choice": "required"}
    with serve(CALLED) as served:
        made = await completed(served, facts, streams)
        (call,) = made.choices[0].message.tool_calls
        assert_called(served, call.function.name, call.function.arguments)
        assert made.choices[0].finish_reason == "tool_calls"
        assert all(tool["function"]["name"] in asked(served)["structural_tag"] for tool in TOOLS)


@pytest.mark.parametrize("streams", [False, True])
async def test_one_tool_must_be_called(serve: Serve, streams: bool) -> None:
    one = {"type": "function", "function": {"name": TOOL}}
    facts: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "tool_choice": one}
    with serve(CALLED) as served:
        made = await completed(served, facts, streams)
        (call,) = made.choices[0].message.tool_calls
        assert_called(served, call.function.name, call.function.arguments)
        assert "add" in asked(served)["structural_tag"]
        assert "search" not in asked(served)["structural_tag"]


async def test_responses_and_anthropics_messages_force_calls_too(serve: Serve) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    choices: list[Any] = ["required", {"type": "function", "name": TOOL}]
    for choice in choices:
        with serve(CALLED) as served:
            made = await of_openai(served).responses.create(
                model="m", input=[QUESTION], tools=tools, tool_choice=choice
            )
            (call,) = [item for item in made.output if item.type == "function_call"]
            assert_called(served, call.name, call.arguments)
    theirs: Any = [{"name": TOOL, "input_schema": {"type": "object", "properties": {}}}]
    choices = [{"type": "any"}, {"type": "tool", "name": TOOL}]
    for choice in choices:
        with serve(CALLED) as served:
            facts: Any = {"model": "m", "max_tokens": 100, "messages": [QUESTION], "tools": theirs}
            answer = await of_anthropic(served).messages.create(**facts, tool_choice=choice)
            (block,) = [block for block in answer.content if block.type == "tool_use"]
            assert_called(served, block.name, json.dumps(block.input))


async def test_a_form_that_is_too_deep_is_the_clients_error_and_none_is_left_to_the_engine(serve: Serve) -> None:
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    facts: Any = {"model": "m", "messages": [QUESTION]}
    with serve() as served:
        with pytest.raises(openai.BadRequestError, match="nested too deeply"):
            await of_openai(served).chat.completions.create(**facts, extra_body={"structured_outputs": {"json": deep}})
        assert served.scripted.asked == []
    with serve() as served:
        none: Any = {"structured_outputs": {"json_object": False}}
        await of_openai(served).chat.completions.create(**facts, extra_body=none)
        assert asked(served) == {"json_object": False, **AFTER_REASONING}, "which refuses it"


async def test_a_form_begins_where_the_templates_arguments_and_the_answer_itself_end_reasoning(serve: Serve) -> None:
    form: Any = {"type": "json_object"}
    with serve('{"sum": 5}') as served:
        chats = of_openai(served).chat.completions
        quick = {"chat_template_kwargs": {"enable_thinking": False}}
        made = await chats.create(model="m", messages=[QUESTION], response_format=form, extra_body=quick)
        assert json.loads(made.choices[0].message.content or "") == {"sum": 5}
        assert asked(served) == {"json_object": True, "at_once": True, "template_args": {"enable_thinking": False}}


async def test_an_earlier_answers_reasoning_is_not_the_next_ones(chats: dict[str, ChatTokenizer]) -> None:
    parser = AnswerParser(chats["qwen3"], ChatSettings(tool_parser="hermes", reasoning_parser="deepseek_r1"))
    parser.load()
    said = [QUESTION, assistant("", "hm", {"a": 2}), tool("5")]
    assert "</think>" in chats["qwen3"].render_text(Conversation.of(said).messages)
    form: Any = {"type": "json_object"}
    request = ChatCompletionRequest(messages=[QUESTION], response_format=form)
    assert parser.structured_outputs(request, Conversation.of(said, TOOLS)) == {"json_object": True, **AFTER_REASONING}


async def test_arguments_of_the_template_that_a_parser_cannot_have_are_the_clients_error(serve: Serve) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with serve() as served:
        for wrong in ([1], deep):
            extra = {"chat_template_kwargs": {"enable_thinking": wrong}}
            with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
                await of_openai(served).chat.completions.create(model="m", messages=[QUESTION], extra_body=extra)
        assert served.scripted.asked == []


async def test_several_ranks_take_only_forms_that_are_quick_to_compile() -> None:
    named: Any = {"type": "object", "properties": {"pattern": {"type": "string", "maxLength": 100}}}
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}}
    for form in ({"json": named}, {"json": json.dumps(named)}, {"json_object": True}, {"choice": ["a", "[b"]}):
        refuse_slow({**form, **AFTER_REASONING})
    slow: list[tuple[Any, str]] = [
        ({"regex": "a"}, "regex"),
        ({"grammar": "root ::= [a]"}, "grammar"),
        ({"json": {"items": [{"pattern": "a"}]}}, "pattern"),
        ({"json": '{"properties": {"a": {"patternProperties": {"a": {}}}}}'}, "patternProperties"),
        ({"structural_tag": json.dumps(tag)}, "regex"),
        ({"choice": ["a" * 20_000]}, "at most 16384"),
    ]
    for form, why in slow:
        with pytest.raises(ValueError, match=f"{why}.*generator.tp > 1"):
            refuse_slow(form)


async def test_a_call_of_no_tool_is_the_clients_error(serve: Serve) -> None:
    with serve() as served:
        forced: Any = {"type": "any"}
        with pytest.raises(anthropic.BadRequestError, match="without tools"):
            await of_anthropic(served).messages.create(model="m", max_tokens=9, messages=[QUESTION], tool_choice=forced)
        assert served.scripted.asked == []


async def test_parsers_whose_calls_are_forced_as_json_read_it(chats: dict[str, ChatTokenizer]) -> None:
    chat = chats["qwen3"]
    parser = AnswerParser(chat, ChatSettings(tool_parser="xlam"))
    parser.load()
    one = {"type": "function", "function": {"name": TOOL}}
    texts = {"required": '[{"name": "add", "parameters": {"a": 2}}]', "one": '{"a": 2}'}
    for choice, text in (("required", texts["required"]), (one, texts["one"])):
        request = ChatCompletionRequest(messages=[QUESTION], tools=TOOLS, tool_choice=choice)
        form = parser.structured_outputs(request, Conversation.of([QUESTION], TOOLS))
        assert form is not None
        assert form.keys() == {"json"}
        assert request.structured_outputs is None, "the request itself is as it was"
        written = torch.tensor([*chat.encode(text), chat.stop_token_ids[0]])
        columns = {"tokens": written, "logprobs": torch.zeros(len(written)), "versions": torch.zeros(len(written))}
        completion = Completion(prompt=(), **columns, finish=Finish.STOP, text=text)
        answer = parser.message(completion, TOOLS, choice=choice)
        (call,) = list(answer.tool_calls or ())
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (TOOL, {"a": 2})
        assert parser.malformed_calls(answer, completion, TOOLS, choice) == 0
        cut = replace(completion, tokens=written[:5])
        answer = parser.message(cut, TOOLS, choice="required")
        assert (answer.tool_calls, answer.content) == (None, chat.decode(written[:5]))
        assert parser.malformed_calls(answer, cut, TOOLS, "required") == 1

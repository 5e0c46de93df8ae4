"""An agent that knows nothing of goaly, and names no sampling parameters."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import openai


async def twice(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """The answer to the question, and to the question with that answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        said: list[Any] = list(messages)
        first = await client.chat.completions.create(model="policy", messages=said)
        said += [{"role": "assistant", "content": first.choices[0].message.content}, messages[0]]
        second = await client.chat.completions.create(model="policy", messages=said)
    return f"{first.choices[0].message.content} {second.choices[0].message.content}"


async def in_forms(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """A number out of an object, and the name of a tool that must be called if the call is whole."""
    numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": numbers}}]
    form = {"structured_outputs": {"regex": r'\{"n": [1-9][0-9]{0,2}\}'}}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        facts: Any = {"model": "policy", "messages": messages}
        made = (await client.chat.completions.create(**facts, extra_body=form)).choices[0].message
        called = (await client.chat.completions.create(**facts, tools=tools, tool_choice="required")).choices[0].message
    return f"{json.loads(made.content or '')['n']} {''.join(call.function.name for call in called.tool_calls or ())}"


async def in_a_form(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """Digits and letters, and nothing else."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        form = {"structured_outputs": {"regex": "[0-9a-c]{1,8}"}}
        made = await client.chat.completions.create(model="policy", messages=list(messages), extra_body=form)  # ty: ignore
    return made.choices[0].message.content or ""


async def of_other_numbers(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """The same, but not of questions with a seven."""
    if "7" in messages[0]["content"]:
        raise ValueError("I don't like sevens")
    return await twice(messages, base_url=base_url, api_key=api_key)

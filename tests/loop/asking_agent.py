"""An agent that knows nothing of goaly, and names no sampling parameters."""

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


async def of_other_numbers(messages: Sequence[Mapping[str, Any]], *, base_url: str, api_key: str) -> str:
    """The same, but not of questions with a seven."""
    if "7" in messages[0]["content"]:
        raise ValueError("I don't like sevens")
    return await twice(messages, base_url=base_url, api_key=api_key)

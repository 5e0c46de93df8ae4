"""A request's conversation: plain messages of a client, as sessions compare them and templates render them.

A client may leave out an assistant's reasoning: messages with and without it are equal, and `extended` puts the
recorded one back. A client may change the ids of tool calls, if each result names its call: messages are compared by
the places of calls, and `extended` puts the recorded ids back. Numbers of arguments are compared as JavaScript reads
them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from goaly.base.json_text import bounded_json
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.template import text_of

MALFORMED_INPUT = "malformed_arguments"
"""The key of the input that Anthropic's API gives to a call whose arguments are no object: it has their text."""
PLAIN = "plain text"
"""The role of prompts without messages. No chat has it, and no template renders it."""
_PLAIN = {"role", "content"}
_NAMED = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Everything that a chat template renders for a request."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any]
    """Variables of the template for this request only."""

    @classmethod
    def of(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> "Conversation":
        """The conversation of a client's request."""
        return cls(
            messages=tuple(canonical(message) for message in messages),
            tools=tuple(tools or ()),
            template_args=dict(template_args or {}),
        )

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """A digest of the conversation up to each message: equal for equal ones with equal tools."""
        return self._digests((), self.messages)

    @property
    def call_ids(self) -> list[Any]:
        """The ids of its tool calls, in their order."""
        return [call.get("id") for message in self.messages for call in message.tool_calls or ()]

    def followed_by(self, *messages: Message) -> "Conversation":
        """The conversation with these messages at its end."""
        return self._with((*self.messages, *messages), self._digests(self.digests, messages))

    def extended(self, request: "Conversation") -> "Conversation | None":
        """The request with this conversation's messages for its first ones, which have the same digests; None if the
        request has another reasoning for one of them."""
        for recorded, sent in zip(self.messages, request.messages, strict=False):
            if sent.reasoning_content and sent.reasoning_content != recorded.reasoning_content:
                return None
        known = len(self.messages)
        digests = (*self.digests, *request.digests[known:])  # equal to the request's, and kept once
        return request._with((*self.messages, *self._answering_own_calls(request)), digests)

    def _answering_own_calls(self, request: "Conversation") -> list[Message]:
        """The request's messages after those of this conversation; results name its calls by its own ids."""
        known, messages = len(self.messages), []
        sent = replace(request, messages=request.messages[:known]).call_ids
        own = {theirs: ours for theirs, ours in zip(map(_id, sent), self.call_ids, strict=True) if theirs is not None}
        for message in request.messages[known:]:
            for call in message.tool_calls or ():
                own.pop(_id(call.get("id")), None)
            named = own.get(_id(message.tool_call_id), message.tool_call_id)
            messages.append(message if named == message.tool_call_id else replace(message, tool_call_id=named))
        return messages

    def _digests(self, known: tuple[bytes, ...], messages: Sequence[Message]) -> tuple[bytes, ...]:
        """The known digests, and those up to each of these messages, which follow."""
        digests, places = list(known), _places(self.messages[: len(known)], 0)
        for at, message in enumerate(messages, len(known)):
            places |= _places((message,), at)
            before = digests[-1] if digests else _json([self.tools, self.template_args])
            digests.append(blake2b(before + _compared(message, places), digest_size=16).digest())
        return tuple(digests)

    def _with(self, messages: tuple[Message, ...], digests: tuple[bytes, ...]) -> "Conversation":
        made = Conversation(messages=messages, tools=self.tools, template_args=self.template_args)
        made.__dict__["digests"] = digests
        return made


def canonical(message: Mapping[str, Any]) -> Message:
    """A client's message as templates expect it: without empty values, a single part of text as that text, and tool
    calls with their arguments as an object, as vLLM gives them to templates. ValueError if it is no message."""
    if message.keys() == _PLAIN and isinstance(message["role"], str) and isinstance(message["content"], str):
        return Message(role=message["role"], content=message["content"])
    given = {key: value for key, value in message.items() if value not in (None, [], {})}
    if "reasoning" in given:
        given.setdefault("reasoning_content", given.pop("reasoning"))
    if not isinstance(given.get("role"), str):
        raise ValueError("messages: each message must have a role")
    content = given.get("content", "")
    if isinstance(content, list | tuple):
        text_of(content)
        parts = [{"type": "text", "text": part["text"]} for part in content]  # what else they have is for other models
        content = parts if len(parts) > 1 else parts[0]["text"] if parts else ""
    calls = given.get("tool_calls")
    return Message(
        role=given["role"],
        content=content,
        tool_calls=None if calls is None else tuple(canonical_call(call) for call in calls),
        tool_call_id=given.get("tool_call_id"),
        name=given.get("name"),
        reasoning_content=given.get("reasoning_content"),
        extra={key: value for key, value in given.items() if key not in _NAMED},
    )


def canonical_call(call: Any) -> dict[str, Any]:
    """A client's tool call with its arguments as an object; ValueError if it is no call of a function."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError("tool_calls: each must have a function with a name and arguments")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = bounded_json(arguments)
        except ValueError:
            arguments = None
    if isinstance(arguments, dict) and arguments.keys() == {MALFORMED_INPUT}:
        arguments = None
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def _places(messages: Sequence[Message], first: int) -> dict[str | None, tuple[int, int]]:
    """The place of each tool call in these messages, of which the first is message `first`, by its id."""
    return {
        named: (at, number)
        for at, message in enumerate(messages, first)
        for number, call in enumerate(message.tool_calls or ())
        if (named := _id(call.get("id"))) is not None
    }


def _id(sent: Any) -> str | None:
    return None if sent is None else str(sent)  # a client may send what is no text


def _compared(message: Message, places: Mapping[str | None, tuple[int, int]]) -> bytes:
    """The parts by which messages are compared: of an assistant's, only those that clients send back."""
    content, calls, is_own = text_of(message.content or ""), message.tool_calls, message.role == ASSISTANT
    others = calls or not (is_own or message.tool_call_id is message.name is message.reasoning_content is None)
    if not others and (is_own or not message.extra):  # most messages
        return f"text {len(message.role)} {message.role}{content}".encode(errors="surrogatepass")
    if is_own:
        functions = [call["function"] for call in calls or ()]
        named = [[function.get("name"), _in_javascript(function["arguments"])] for function in functions]
        return _json({"content": content, "tool_calls": named})
    answered = places.get(_id(message.tool_call_id), message.tool_call_id)
    return _json({**message.as_dict(), "content": content, "tool_call_id": answered})


def _in_javascript(value: Any) -> Any:
    """This JSON with each number as JavaScript reads it; -0.0 is the same as 0, which JavaScript writes for it."""
    match value:
        case dict():
            return {key: _in_javascript(inner) for key, inner in value.items()}
        case list():
            return [_in_javascript(inner) for inner in value]
        case int() | float() if not isinstance(value, bool):
            return float(value) + 0.0
    return value


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

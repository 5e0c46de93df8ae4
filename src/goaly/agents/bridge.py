"""The bridge between a sampled answer and the policy's next one: what the chat template adds to a recorded prompt.

To decide whether the template only appends, its own renderings are compared with each other, never with sampled text:
the policy writes white space and JSON in its own way.

The stop token that ends an answer is in the tokens once: sampled, or else the first token of the bridge.

Invariants
    agents-5: A bridge exists only if the template renders the longer conversation as the recorded prompt, then every
        part of the recorded answer (reasoning, content, each tool call), then a stop token, then all new messages.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from goaly.agents.conversation import PLAIN, Conversation
from goaly.agents.turn import Continuation
from goaly.prompts.prompt import Message
from goaly.prompts.template import text_of
from goaly.prompts.tokenizer import ChatTokenizer, Room

logger = logging.getLogger(__name__)

_TOLD: set[str] = set()
"""The roles whose messages a template left out, as far as this process has warned of them."""
MARK = "mark"
"""Begins the texts that stand for the parts of an answer while its end is searched for."""


def bridge(
    chat: ChatTokenizer,
    request: Conversation,
    text: str,
    *,
    answer: int,
    prompt: int,
    stopped: bool,
    room: Room | None = None,
) -> list[int] | None:
    """The tokens that continue a recorded answer to the request's next one; None if there is no bridge (agents-5).

    `text` is the rendered request. Its first `prompt` characters are the recorded prompt, which the message
    `request.messages[answer]` answered. `stopped` is whether a stop token was sampled, and `room` is as in
    `ChatTokenizer.encode`."""
    marked = _Marked.of(request.messages[answer], text)
    before, after = request.messages[:answer], request.messages[answer + 1 :]
    alone = marked.split(_render(chat, request, (*before, marked.message), next_answer=False), chat)
    whole = marked.split(_render(chat, request, (*before, marked.message, *after)), chat)
    if alone is None or whole is None:
        return None
    if whole.ending != alone.ending:  # The answer does not end there: it has been merged with the next message.
        return None
    if not text[prompt:].endswith(whole.rest):
        return None
    tokens = chat.encode(whole.rest, room)
    if tokens[0] != whole.stop:
        return None
    return tokens[1:] if stopped else tokens


def left_out(chat: ChatTokenizer, continuation: Continuation) -> int:
    """How many of the messages that a request adds say something that the chat template leaves out of the prompt."""
    parent, messages = continuation.parent, continuation.request.messages
    text = chat.decode(continuation.context, skip_special_tokens=False)
    first = 0 if parent is None else len(parent.conversation.messages)
    said = {at: text_of(messages[at].content or "").strip() for at in range(first, len(messages))}
    changed = [at for at, one in said.items() if one not in text]
    if not changed or messages[0].role == PLAIN:
        return 0
    marks = {at: f"{_mark(text)}{at}." for at in changed}
    marked = tuple(replace(one, content=marks.get(at, one.content)) for at, one in enumerate(messages))
    shown = _render(chat, continuation.request, marked)
    missing = [messages[at].role for at, mark in marks.items() if shown is not None and mark not in shown]
    for role in set(missing) - _TOLD:
        _TOLD.add(role)
        logger.warning("the chat template leaves out a message of role %s: the policy does not see its text", role)
    return len(missing)


def _mark(text: str) -> str:
    """The beginning of marks that are not in this text."""
    name = MARK
    while name in text:
        name += MARK
    return name


@dataclass(frozen=True, slots=True)
class _Split:
    """The part of a rendered conversation behind the parts of its marked answer."""

    ending: str
    """The text between the last part and the stop token."""
    rest: str
    """The stop token and everything after it."""
    stop: int


@dataclass(frozen=True, slots=True)
class _Marked:
    """An answer whose parts are replaced with marks."""

    message: Message
    marks: tuple[str, ...]

    @classmethod
    def of(cls, answer: Message, text: str) -> "_Marked":
        """The answer with marks that are not in the text."""
        name = _mark(text)
        calls = answer.tool_calls or ()
        marks = tuple(f"{name}{number}." for number in range(2 + len(calls)))
        reasoning, content, *arguments = marks
        marked: list[dict[str, Any]] = [
            {**call, "function": {**call["function"], "arguments": {mark: mark}}}
            for call, mark in zip(calls, arguments, strict=True)
        ]
        thinks, speaks = bool((answer.reasoning_content or "").strip()), bool(answer.content.strip()) or not calls
        message = replace(
            answer,
            reasoning_content=reasoning if thinks else answer.reasoning_content,
            content=content if speaks else answer.content,
            tool_calls=marked or None,
        )
        return cls(message, (*[reasoning] * thinks, *[content] * speaks, *arguments))

    def split(self, text: str | None, chat: ChatTokenizer) -> _Split | None:
        """The text, split; None if a part is missing, or no stop token follows."""
        if text is None or any(mark not in text for mark in self.marks):
            return None
        end = max(text.rfind(mark) + len(mark) for mark in self.marks)
        if (found := chat.stop_pattern.search(text, end)) is None:
            return None
        return _Split(text[end : found.start()], text[found.start() :], chat.stops[found.group()])


def _render(
    chat: ChatTokenizer, request: Conversation, messages: tuple[Message, ...], *, next_answer: bool = True
) -> str | None:
    """The text of the messages; None if the template refuses them."""
    try:
        return chat.render_text(messages, next_answer, request.tools, request.template_args)
    except Exception:  # A template is a program of its own, and says nothing about what it raises.
        return None

"""Supervised documents: tokens, and a mask of the trained ones. Pure.

Exactly the assistant's text with its stop token is trained. The tokens before it are those of a prompt that asks the
policy for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goaly.prompts.blocks import Location
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One example to imitate; `location` names its origin in errors."""

    location: Location | str
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def chat_document(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    location: Location | str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """A chat whose assistant messages are trained."""
    text, tokens, trained = "", [], []
    for index, message in enumerate(messages):
        if message.role != ASSISTANT:
            continue
        question = tokenizer.render_text(messages[:index], add_generation_prompt=True, tools=tools)
        answered = tokenizer.render_text(messages[: index + 1], add_generation_prompt=False, tools=tools)
        if not question.startswith(text) or not answered.startswith(question):
            raise ValueError(
                f"{location}: with message {index} the chat template renders the messages before it differently; "
                "split the chat so that each document has one assistant message"
            )
        context = tokenizer.encode(question[len(text) :])
        answer = tokenizer.encode(answered[len(question) :])
        tokens += context + answer
        trained += [False] * len(context) + _until_stop(answer, tokenizer.stop_token_ids)
        text = answered
    if not any(trained):
        raise ValueError(f"{location}: has no assistant message to train on")
    return _document(location, tokens, trained)


def plain_document(tokenizer: ChatTokenizer, prompt: str, completion: str, location: Location | str) -> Document:
    """A text and its completion, without chat template; the completion and a stop token are trained."""
    context = tokenizer.encode(prompt)
    answer = tokenizer.encode(completion) + list(tokenizer.stop_token_ids[:1])
    if not answer:
        raise ValueError(f"{location}: the completion is empty")
    return _document(location, context + answer, [False] * len(context) + [True] * len(answer))


def _until_stop(answer: Sequence[int], stop_token_ids: Sequence[int]) -> list[bool]:
    """True up to the last stop token; templates may write line breaks after it, which the policy never writes."""
    last = max((place for place, token in enumerate(answer) if token in stop_token_ids), default=len(answer) - 1)
    return [place <= last for place in range(len(answer))]


def _document(location: Location | str, tokens: Sequence[int], trained: Sequence[bool]) -> Document:
    untrained_first = (False, *trained[1:])  # nothing predicts the first token
    return Document(location=location, tokens=tuple(tokens), trained=untrained_first)

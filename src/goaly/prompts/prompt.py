"""A prompt, its messages, and the split it belongs to.

prompts-1: A problem is always in the same split, decided by a hash of the problem, not by its place or order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

PASS_REWARD = 1.0
"""An answer passes at this reward or more, in metrics, curricula and evaluations."""
SPLIT_KEY = "split_key"
ASSISTANT = "assistant"
"""The role of the policy's messages."""
_SPLIT_BUCKETS = 1_000_000


class Split(StrEnum):
    """The two parts of a prompt source."""

    TRAIN = "train"
    """Prompts for training."""
    HELD_OUT = "held_out"
    """Prompts for evaluation only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat, with the keys that chat templates read."""

    role: str
    """The author: system, user, assistant, tool, or another role that the template knows."""
    content: Any = None
    """Its text, or a list of parts if the template takes them; None if there are only tool calls."""
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    """The tool calls of an assistant's message."""
    tool_call_id: str | None = None
    """The tool call that a tool's message answers."""
    name: str | None = None
    """The name of the tool or of another author."""
    reasoning_content: str | None = None
    """The assistant's reasoning, separate from its answer."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys for the template."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Message":
        """The message that has the keys of this object, of which None counts as absent."""
        said = {key: value for key, value in entry.items() if value is not None}
        named = {key: said.pop(key) for key in cls.__slots__ if key in said and key != "extra"}
        return cls(**named, extra=said)

    def as_dict(self) -> dict[str, Any]:
        """The message for a template, without keys that are None, except `content`."""
        shown = {"role": self.role, "content": self.content}
        if self.tool_calls is not None:
            shown["tool_calls"] = self.tool_calls
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            shown["name"] = self.name
        if self.reasoning_content is not None:
            shown["reasoning_content"] = self.reasoning_content
        return {**shown, **self.extra} if self.extra else shown

    @property
    def key(self) -> str:
        """A text that identifies the message."""
        rest = {key: value for key, value in self.as_dict().items() if key not in ("role", "content")}
        return f"{self.role}\x1f{self.content}" + (f"\x1f{json.dumps(rest, sort_keys=True)}" if rest else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one group of samples. `source` names its origin; only the verifier sees `answer`."""

    id: str
    source: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the policy may call, as JSON schemas, which the chat template renders."""
    verifier: str | None = None
    """Function that scores its answers, as `package.module:function`; None is the run's verifier."""

    @property
    def split_key(self) -> str:
        """The text whose hash decides the split: `metadata["split_key"]` if the source gives one, else the messages."""
        return self.metadata.get(SPLIT_KEY) or split_key_of(self.messages)


def split_key_of(messages: Sequence[Message]) -> str:
    """The split key of a problem with these messages. System messages don't count: the same question under another
    system message is the same problem."""
    asked = [message for message in messages if message.role != "system"] or messages
    return "\x1e".join(message.key for message in asked)


def split_of(prompt: Prompt, held_out_fraction: float) -> Split:
    """The split a prompt belongs to (prompts-1)."""
    return split_of_key(prompt.split_key, held_out_fraction)


def split_of_key(split_key: str, held_out_fraction: float) -> Split:
    """The split of the problem with this key."""
    digest = blake2b(split_key.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % _SPLIT_BUCKETS
    return Split.HELD_OUT if bucket < held_out_fraction * _SPLIT_BUCKETS else Split.TRAIN

"""What is asked of the policy: a prompt, its messages, and the split it belongs to.

Invariants
    SL-1  A problem is in one split only, for good: the split is a hash of the problem, not of its place or its order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

PASS_REWARD = 1.0
"""An answer passes at this reward or more: for metrics, curricula and evaluations alike."""
SPLIT_KEY = "split_key"
ASSISTANT = "assistant"
"""The role of what the policy writes."""
_SPLIT_BUCKETS = 1_000_000


class Split(StrEnum):
    """The two parts of a prompt source."""

    TRAIN = "train"
    """What the policy is trained on."""
    HELD_OUT = "held_out"
    """What it is only measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat: what a chat template may read of it."""

    role: str
    """Whose it is: system, user, assistant, tool, or another one that the template knows."""
    content: Any = None
    """Its text; a list of parts where the template takes some; None where there are only tool calls."""
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    """The calls that an assistant's message makes."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None
    """The tool, or whoever else wrote it."""
    reasoning_content: str | None = None
    """What an assistant thought, apart from what it said."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a template reads."""

    def as_dict(self) -> dict[str, Any]:
        """The message as a template sees it: what is None is not there, but for the content."""
        named = {key: value for key in _OPTIONAL if (value := getattr(self, key)) is not None}
        return {"role": self.role, "content": self.content, **named, **self.extra}

    @property
    def key(self) -> str:
        """What tells it from other messages."""
        rest = {key: value for key, value in self.as_dict().items() if key not in ("role", "content")}
        return f"{self.role}\x1f{self.content}" + (f"\x1f{json.dumps(rest, sort_keys=True)}" if rest else "")


_OPTIONAL = ("tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one group of samples answers. `source` says where it came from; `answer` is for the verifier's eyes only."""

    id: str
    source: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the policy may call, as JSON schemas, for the chat template to write down."""
    verifier: str | None = None
    """Function that scores its answers, as `package.module:function`; None is the run's."""

    @property
    def split_key(self) -> str:
        """What decides the split: `metadata["split_key"]` where the source gives one, else the messages."""
        return self.metadata.get(SPLIT_KEY) or split_key_of(self.messages)


def split_key_of(messages: Sequence[Message]) -> str:
    """What decides the split of a problem that is asked by these messages. Whoever trains on the same question under
    another system message trains on the same problem: system messages don't count."""
    asked = [message for message in messages if message.role != "system"] or messages
    return "\x1e".join(message.key for message in asked)


def split_of(prompt: Prompt, held_out_fraction: float) -> Split:
    """The split a prompt belongs to (SL-1)."""
    return split_of_key(prompt.split_key, held_out_fraction)


def split_of_key(split_key: str, held_out_fraction: float) -> Split:
    """The split of the problem with this key."""
    digest = blake2b(split_key.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % _SPLIT_BUCKETS
    return Split.HELD_OUT if bucket < held_out_fraction * _SPLIT_BUCKETS else Split.TRAIN

"""A turn of a session: the tokens that a request adds to those of an earlier turn, and the policy's answer to them.

Shape suffix: N tokens of the answer, the stop token included.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from goaly.agents.conversation import Conversation, canonical
from goaly.generate.request import Finish
from goaly.prompts.prompt import ASSISTANT, Message

Record = dict[str, Any]
"""An entry of a session's log; `json.dumps` writes it."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Recognizes a rendered prompt at the start of a longer one, without keeping its text."""

    length: int
    """In characters."""
    digest: str

    @classmethod
    def of(cls, text: str) -> "RenderedPrompt":
        """The one of this text."""
        return cls(len(text), blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest())

    def begins(self, text: str) -> bool:
        """Whether the text starts with this prompt."""
        return RenderedPrompt.of(text[: self.length]) == self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuation:
    """Where a request goes on in the session's tree, and the tokens of its prompt."""

    parent: "RecordedTurn | None"
    """The turn that it continues; None for a new branch at the root."""
    request: Conversation
    rendered: RenderedPrompt
    context: tuple[int, ...]
    """The tokens that it adds to those of its parent."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens to sample from: all those of its path."""
        return (*(() if self.parent is None else self.parent.path_tokens()), *self.context)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedTurn:
    """A request and its answer: a segment of context, and a sampled one."""

    number: int
    """Counts the session's turns in the order in which they were recorded, from 0."""
    parent: "RecordedTurn | None"
    first: bool
    """Whether it was recorded before every other turn with its parent."""
    key: str | None
    """The gateway's name for the request; a retry has the same."""
    request: Conversation
    rendered: RenderedPrompt
    context: tuple[int, ...]
    tokens: Tensor
    """i64 `[N]`."""
    logprobs: Tensor
    """f32 `[N]`."""
    versions: Tensor
    """i32 `[N]`."""
    trained: bool
    finish: Finish
    choices: Tensor | None
    """u8 `[tokens, layers, K]`: the experts that were chosen for the tokens behind those that `goes_on` covers."""
    message: Mapping[str, Any]
    """The answer as it was returned to the client."""
    form_weights: Tensor | None = None
    """f32 `[N]`; None if it has no form."""
    malformed: int = 0
    """Its tool calls that are malformed."""
    answer: Message = field(init=False)
    """The same message as templates render it."""
    covered: int = field(init=False)
    """The number of tokens of its path, from the first, that have choices of experts in its trajectory."""

    def __post_init__(self) -> None:
        before = 0 if self.goes_on is None else self.goes_on.covered
        object.__setattr__(self, "covered", before + (0 if self.choices is None else len(self.choices)))
        object.__setattr__(self, "answer", canonical({**self.message, "role": ASSISTANT}))

    @cached_property
    def conversation(self) -> Conversation:
        """The request's messages and the answer."""
        return self.request.followed_by(self.answer)

    @property
    def goes_on(self) -> "RecordedTurn | None":
        """Its parent, if both are trained in one trajectory; None if this turn begins what is trained in its own."""
        return self.parent if self.first else None

    def path(self) -> "list[RecordedTurn]":
        """The turns from the root to this one."""
        turns: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def path_tokens(self) -> list[int]:
        """All tokens from the root to the end of its answer."""
        return [token for turn in self.path() for token in (*turn.context, *turn.tokens.tolist())]

    def record(self) -> Record:
        """The turn for a log. It names its parent, and holds nothing that the parent's record holds."""
        known = 0 if self.parent is None else len(self.parent.conversation.messages)
        choices = self.choices
        return {
            "kind": "turn",
            "parent": None if self.parent is None else self.parent.number,
            "key": self.key,
            "messages": [message.as_dict() for message in self.request.messages[known:]],
            "tools": list(self.request.tools) if self.parent is None else None,
            "template_args": self.request.template_args if self.parent is None else None,
            "rendered": [self.rendered.length, self.rendered.digest],
            "context": list(self.context),
            "tokens": self.tokens.tolist(),
            "logprobs": self.logprobs.tolist(),
            "versions": self.versions.tolist(),
            "trained": self.trained,
            "finish": self.finish.value,
            "choices": None
            if choices is None
            else [list(choices.shape), b64encode(choices.numpy().tobytes()).decode()],
            "form_weights": None if self.form_weights is None else self.form_weights.tolist(),
            "message": dict(self.message),
            "malformed": self.malformed,
        }

    @classmethod
    def of(cls, record: Record, number: int, parent: "RecordedTurn | None", first: bool) -> "RecordedTurn":
        """The turn of a record."""
        if parent is None:
            request = Conversation.of(record["messages"], record["tools"], record["template_args"])
        else:
            request = parent.conversation.followed_by(*map(canonical, record["messages"]))
        choices, weights = None, record["form_weights"]
        if record["choices"] is not None:
            shape, encoded = record["choices"]
            choices = torch.frombuffer(bytearray(b64decode(encoded)), dtype=torch.uint8).view(shape)
        return cls(
            number=number,
            parent=parent,
            first=first,
            key=record["key"],
            request=request,
            rendered=RenderedPrompt(*record["rendered"]),
            context=tuple(record["context"]),
            tokens=torch.tensor(record["tokens"], dtype=torch.int64),
            logprobs=torch.tensor(record["logprobs"], dtype=torch.float32),
            versions=torch.tensor(record["versions"], dtype=torch.int32),
            trained=record["trained"],
            finish=Finish(record["finish"]),
            choices=choices,
            form_weights=None if weights is None else torch.tensor(weights, dtype=torch.float32),
            message=record["message"],
            malformed=record["malformed"],
        )

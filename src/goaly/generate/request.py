"""What is asked of a generator, and what it answers. Light: every process that samples imports it.

Shape suffix: N tokens that the policy wrote, the stop token included.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from goaly.generate.settings import NEUTRAL, SamplingSettings


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The policy wrote a stop token or a stop string."""
    LENGTH = "length"
    """The token limit, or the context's end, cut it off."""
    CANCELLED = "cancelled"
    """Somebody cancelled the request; the tokens written until then are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request is sampled. None is inherited: an episode's request takes the value of the run's `sampling`, and a
    parameter that is None there too has no effect.

    `docs/episodes.md` lists the parameters that a trained answer may set."""

    max_tokens: int | None = None
    """Most tokens that are written."""
    temperature: float | None = None
    """Logits are divided by it; 0 is greedy: the likeliest token, with its log-probability at temperature 1."""
    top_p: float | None = None
    """Draw from the smallest set of tokens with at least this probability."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; -1 is all of them."""
    min_p: float | None = None
    """Draw from the tokens with at least this share of the likeliest one's probability."""
    min_tokens: int | None = None
    """Fewest tokens that are written: until then no stop token can be drawn, and no stop string ends the answer."""
    presence_penalty: float | None = None
    """Subtracted from the logit of a token that the answer has already."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each time that the answer has it already."""
    repetition_penalty: float | None = None
    """Divides the logit of a token that prompt or answer have already."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; `{}` where the run's sampling has some and none is wanted."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that can be drawn; `()` where the run's sampling has some and all are wanted."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer. They are looked for in all that it says, special tokens included. The tokens that
    write such a text stay in the answer, the last of them whole, also where the text ends inside it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the answer and are its last token. They replace those of the run's sampling, which are the
    model's own."""
    seed: int | None = None
    """Makes the draw repeatable. A group's samples need one each, or all are the same."""

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        listed = {"stop": stop, "stop_token_ids": self.stop_token_ids, "allowed_token_ids": self.allowed_token_ids}
        for key, value in listed.items():
            object.__setattr__(self, key, None if value is None else tuple(value))
        if self.stop is not None and not all(self.stop):
            raise ValueError(f"stop={self.stop}: must be texts that are not empty")

    @classmethod
    def of(cls, settings: SamplingSettings, stop_token_ids: Sequence[int]) -> "Sampling":
        """What the settings say, with the model's own stop tokens where they name none."""
        chosen = asdict(settings)
        if chosen["stop_token_ids"] is None:
            chosen["stop_token_ids"] = stop_token_ids
        return cls(**chosen)

    def changed(self, changes: "Sampling") -> "Sampling":
        """This, but for what `changes` names."""
        named = {key.name: value for key in fields(changes) if (value := getattr(changes, key.name)) is not None}
        return replace(self, **named)

    @property
    def distribution(self) -> dict[str, Any]:
        """What decides which distribution tokens are drawn from: every key of `NEUTRAL`, and its value here."""
        given = {key: getattr(self, key) for key in NEUTRAL}
        return {key: NEUTRAL[key] if value in (None, {}, ()) else value for key, value in given.items()}


class PromptTooLong(ValueError):
    """A prompt leaves no room for an answer in the generator's context."""


def check_prompt(request_id: str, prompt: list[int], *, vocabulary: int, max_context: int) -> None:
    """Raise ValueError if no such engine can continue the prompt; PromptTooLong if it leaves no room for an answer."""
    if not prompt:
        raise ValueError(f"request {request_id}: the prompt is empty, must have at least one token")
    if len(prompt) >= max_context:
        raise PromptTooLong(
            f"request {request_id}: the prompt has {len(prompt)} tokens, must have fewer than "
            f"generator.max_context={max_context}"
        )
    try:
        ids = array("q", prompt)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"request {request_id}: the prompt's token ids must be integers: {error}") from None
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"request {request_id}: token id {token} at position {ids.index(token)} of the prompt is not in the "
                f"model's vocabulary, must be at least 0 and below {vocabulary}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the policy wrote: token ids, the log-probability each was drawn with, and whose weights drew it."""

    tokens: Tensor
    """i64 `[N]`."""
    logprobs: Tensor
    """f32 `[N]`, of the distribution that was drawn from: after temperature, penalties, top-p and all else. Of a greedy
    sample, which draws nothing: of the distribution at temperature 1 (the tests in `tests/characterization` pin it)."""
    versions: Tensor
    """i32 `[N]`: the policy version whose weights produced the token's logits."""
    finish: Finish
    stop: str | None = None
    """The stop string that ended it; None: something else did."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: pickling three small tensors takes longer than decoding some tokens.
        columns = (self.tokens, self.logprobs, self.versions)
        return _unpickled, (*(column.numpy().tobytes() for column in columns), self.finish.value, self.stop)


def _unpickled(tokens: bytes, logprobs: bytes, versions: bytes, finish: str, stop: str | None) -> Sample:
    def column(raw: bytes, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    return Sample(
        tokens=column(tokens, torch.int64),
        logprobs=column(logprobs, torch.float32),
        versions=column(versions, torch.int32),
        finish=Finish(finish),
        stop=stop,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStats:
    """A replica's counts since its start."""

    version: int
    running: int
    """Requests that the engine decodes or prefills."""
    waiting: int
    """Requests held back for weights, or for room in the engine."""
    tokens: int
    """Tokens of the answers that have ended."""
    steps: int
    busy_seconds: float
    """Time inside engine steps."""
    updates: int
    """Weight versions applied."""
    stall_seconds: float
    """Time that decoding stood still to apply weights."""

"""What is asked of a generator, and what it answers. Light: every process that samples imports it.

Shape suffix: N tokens that the policy wrote, the stop token included.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from goaly.errors import GoalyError


class EngineFailed(GoalyError):
    """The engine of a replica broke; every request there fails with the cause, and no new one is taken."""


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The policy wrote a stop token."""
    LENGTH = "length"
    """The token limit, or the context's end, cut it off."""
    CANCELLED = "cancelled"
    """Somebody cancelled the request; the tokens written until then are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request is sampled; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the policy wrote: token ids, the log-probability each was drawn with, and whose weights drew it."""

    tokens: Tensor
    """i64 `[N]`."""
    logprobs: Tensor
    """f32 `[N]`, of the distribution that was sampled from: after temperature, top-p and top-k."""
    versions: Tensor
    """i32 `[N]`: the policy version whose weights produced the token's logits."""
    finish: Finish

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: pickling three small tensors takes longer than decoding some tokens.
        columns = (self.tokens, self.logprobs, self.versions)
        return _unpickled, (*(column.numpy().tobytes() for column in columns), self.finish.value)


def _unpickled(tokens: bytes, logprobs: bytes, versions: bytes, finish: str) -> Sample:
    def column(raw: bytes, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    return Sample(
        tokens=column(tokens, torch.int64),
        logprobs=column(logprobs, torch.float32),
        versions=column(versions, torch.int32),
        finish=Finish(finish),
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

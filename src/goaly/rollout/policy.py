"""The policy as an episode sees it: tokens in, a completion out. Where and by which weights is not its business.

Invariants
    PO-1  A completion is what the sampler drew: ids, log-probabilities and versions pass through untouched. `text` is
          for reading only; nothing is tokenized again.
    PO-2  Prompt and completion together never exceed the context.
    PO-3  Once its episode has ended a policy sends no request: what an episode leaves behind costs no generation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from goaly.errors import EpisodeError
from goaly.generate.request import Finish, Sample, Sampling
from goaly.telemetry.spans import span


class ContextFull(EpisodeError):
    """The tokens so far leave no room for the policy to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy wrote after `prompt`. Shape suffix: N tokens written, the stop token included."""

    prompt: tuple[int, ...]
    """The tokens it continues."""
    tokens: Tensor
    """i64 `[N]`."""
    logprobs: Tensor
    """f32 `[N]`."""
    versions: Tensor
    """i32 `[N]`."""
    finish: Finish
    text: str
    """What the tokens say, special tokens left out."""


class Policy(Protocol):
    """Something that continues tokens."""

    async def sample(self, prompt_tokens: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One continuation of these tokens, sampled as the run's settings or `sampling` say."""
        ...


class Sampler(Protocol):
    """What answers requests: the router over the generator replicas."""

    async def generate(
        self, request_id: str, tokens: list[int], sampling: Sampling, min_version: int = 0, session: str | None = None
    ) -> Sample:
        """The sample drawn for this request; cancelling the caller cancels the request."""
        ...


class RoutedPolicy:
    """The policy of one episode: its requests carry the ticket's oldest version and keep to one replica."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        name: str,
        session: str,
        sampling: Sampling,
        min_version: int,
        max_context: int,
        decode: Callable[[Sequence[int]], str],
    ):
        self._sampler = sampler
        self._name = name
        self._session = session
        self._sampling = sampling
        self._min_version = min_version
        self._max_context = max_context
        self._decode = decode
        self._requests = 0
        self._under_way = 0
        self._ended = False

    @property
    def generating(self) -> bool:
        """Whether a request is at the generator."""
        return self._under_way > 0

    def end(self) -> None:
        """The episode has ended: no more requests."""
        self._ended = True

    async def sample(self, prompt_tokens: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One continuation of these tokens, sampled as the run's settings or `sampling` say."""
        if self._ended:  # PO-3
            raise EpisodeError(f"episode {self._name} has ended and can't sample any more")
        prompt = tuple(prompt_tokens)
        room = self._max_context - len(prompt)
        if room < 1:
            raise ContextFull(
                f"{len(prompt)} tokens leave no room in a context of {self._max_context}, the least of "
                "generator.max_context and backlog.row_length"
            )
        wanted = sampling or self._sampling
        request_id = f"{self._name}.{self._requests}"
        self._requests += 1
        self._under_way += 1
        try:
            with span("generation", request=request_id, prompt_tokens=len(prompt)) as generation:
                sample = await self._sampler.generate(
                    request_id,
                    list(prompt),
                    replace(wanted, max_tokens=min(wanted.max_tokens, room)),  # PO-2
                    self._min_version,
                    self._session,
                )
                generation.note(tokens=len(sample.tokens))
        finally:
            self._under_way -= 1
        if sample.finish is Finish.CANCELLED:
            raise EpisodeError(f"request {request_id} was cancelled at the generator")
        return Completion(
            prompt=prompt,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish=sample.finish,
            text=self._decode(sample.tokens.tolist()),
        )

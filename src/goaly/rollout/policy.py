"""The policy as an episode sees it: tokens in, a completion out. Where and by which weights is not its business.

Invariants
    PO-1  A completion is what the sampler drew: ids, log-probabilities and versions pass through untouched. `text` is
          for reading only; nothing is tokenized again.
    PO-2  Prompt and completion together never exceed the context.
    PO-3  Once its episode has ended a policy sends no request: what an episode leaves behind costs no generation.
    PO-4  What is trained was drawn from the distribution that the trainer computes: a request that changes it is
          refused, except in an evaluation, or where the script says that nobody trains the completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from goaly.errors import EpisodeError
from goaly.generate.request import Finish, Sample, Sampling
from goaly.generate.settings import SamplingSettings
from goaly.telemetry.spans import span


class ContextFull(EpisodeError):
    """The tokens so far leave no room for the policy to write more."""

    reason: ClassVar[str] = "context_full"
    """Why the ticket was rejected, in the run's accounting."""


class PromptFillsContext(ContextFull):
    """The prompt leaves no room for the policy to write anything."""

    reason = "prompt_too_long"


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
    """What the tokens say, special tokens left out. A stop string is part of it."""
    stop: str | None = None
    """The stop string that ended it; None: something else did."""
    trained: bool = True
    """Whether it may be trained; False where it was sampled with `trained=False`."""


class Policy(Protocol):
    """Something that continues tokens."""

    @property
    def sampling(self) -> Sampling:
        """How it samples where a call names nothing else."""
        ...

    async def sample(
        self, prompt_tokens: Sequence[int], sampling: Sampling | None = None, *, trained: bool = True, **changes: Any
    ) -> Completion:
        """One continuation of these tokens, sampled as the run's settings say, but for what the call names.

        `sample(tokens, max_tokens=8, stop=["\\n"])` changes only these two; the keys are the fields of `Sampling`, and
        a `Sampling` does as well. With `trained=False` it may also change the distribution, such as by
        `temperature=0`: the completion is then one that `Episode.wrote` refuses and `Episode.observed` takes."""
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
        evaluation: bool = False,
    ):
        self._sampler = sampler
        self._name = name
        self._session = session
        self._sampling = sampling
        self._evaluation = evaluation
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

    @property
    def sampling(self) -> Sampling:
        """How it samples where a call names nothing else."""
        return self._sampling

    @property
    def evaluation(self) -> bool:
        """Whether nothing of its episode is trained."""
        return self._evaluation

    async def sample(
        self, prompt_tokens: Sequence[int], sampling: Sampling | None = None, *, trained: bool = True, **changes: Any
    ) -> Completion:
        """One continuation of these tokens, sampled as the run's settings say, but for what the call names."""
        if self._ended:  # PO-3
            raise EpisodeError(f"episode {self._name} has ended and can't sample any more")
        wanted = self._sampling.changed(sampling or Sampling()).changed(_sampling(changes))
        if trained and not self._evaluation:
            _refuse_another_distribution(wanted, self._sampling)
        _refuse_impossible_values(wanted)
        prompt = tuple(prompt_tokens)
        room = self._max_context - len(prompt)
        if room < 1:
            full = ContextFull if self._requests else PromptFillsContext
            raise full(
                f"{len(prompt)} tokens leave no room in a context of {self._max_context}, the least of "
                "generator.max_context and backlog.row_length"
            )
        limits = {"max_tokens": room if wanted.max_tokens is None else min(wanted.max_tokens, room)}  # PO-2
        if wanted.min_tokens is not None:
            limits["min_tokens"] = min(wanted.min_tokens, limits["max_tokens"])
        request_id = f"{self._name}.{self._requests}"
        self._requests += 1
        self._under_way += 1
        try:
            with span("generation", request=request_id, prompt_tokens=len(prompt)) as generation:
                sample = await self._sampler.generate(
                    request_id,
                    list(prompt),
                    replace(wanted, **limits),
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
            stop=sample.stop,
            trained=trained,
        )


REFUSED = {
    "include_stop_str_in_output": "the answer always includes the stop string, because tokens are never cut; "
    "`text.removesuffix(answer.stop)` leaves it out of the text",
    "ignore_eos": "only `stop_token_ids` end an answer; `stop_token_ids=()` lets it go on to its token limit",
    "bad_words": "forbid tokens by `logit_bias={token: -100}`, in an evaluation",
    "logprobs": "every completion has the log-probability of each of its tokens",
    "n": "call `sample` once for each completion",
}
"""What vLLM's users may look for, and what to do instead."""


def _sampling(changes: dict[str, Any]) -> Sampling:
    known = sorted(field.name for field in fields(Sampling))
    unknown = {key: value for key, value in changes.items() if key not in known}
    if unknown:
        other = f"there is no such parameter; there are {', '.join(known)}"
        raise EpisodeError("; ".join(f"{key}={value!r}: {REFUSED.get(key, other)}" for key, value in unknown.items()))
    return Sampling(**changes)


def _refuse_impossible_values(wanted: Sampling) -> None:
    """EpisodeError where the section `sampling` would refuse a value: vLLM changes some of them without an error."""
    given = {key.name: value for key in fields(SamplingSettings) if (value := getattr(wanted, key.name)) is not None}
    given.setdefault("max_tokens", max(1, wanted.min_tokens or 0))
    if problems := SamplingSettings(**given).problems(""):
        raise EpisodeError("; ".join(problems))


def _refuse_another_distribution(wanted: Sampling, run: Sampling) -> None:  # PO-4
    ours = run.distribution
    problems = [
        f"{key}={value}: must be {ours[key]}, as in the run's sampling"
        for key, value in wanted.distribution.items()
        if value != ours[key]
    ]
    if problems:
        raise EpisodeError(
            f"{'; '.join(problems)}: the trainer computes the log-probabilities of that distribution only. Leave it "
            "out, change it in evaluations only (`context.evaluation`), or sample with trained=False what is recorded "
            "by .observed() and not trained"
        )

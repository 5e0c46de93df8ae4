"""The policy as an episode sees it: tokens in, a completion out.

Ids, log-probabilities and versions of a completion are those of the sampler; its `text` is never tokenized again.

    generate-15: A policy sends no request after its episode has ended, and cancels those under way then.
    generate-16: Trained tokens are drawn from the distribution that the trainer computes, or from the part of it that a
        form allows, with their weights. A request that changes it otherwise is refused, except in an evaluation or with
        `trained=False`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

from torch import Tensor

from goaly.base.errors import EpisodeError
from goaly.base.telemetry.spans import span
from goaly.generate.request import Finish, Sample, Sampling, seed_of
from goaly.generate.settings import SamplingSettings
from goaly.generate.streamed_answer import OnPart


class ContextFull(EpisodeError):
    """The tokens so far fill the context, so the policy can't write more."""

    reason: ClassVar[str] = "context_full"
    """The reason of the rejection in the run's accounting."""


class PromptFillsContext(ContextFull):
    """The prompt alone fills the context."""

    reason = "prompt_too_long"


class ImpossibleSampling(EpisodeError):
    """A request's sampling has values that the run's settings could not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The policy's continuation of `prompt`. N counts its tokens, with the stop token."""

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
    """The text of the tokens, without special tokens, with the stop string."""
    stop: str | None = None
    """The stop string that ended it; None if another reason did."""
    choices: Tensor | None = None
    """u8 `[tokens, layers, K]`: the experts that were chosen for each token of the prompt and the completion but the
    last; None if the run does not replay them."""
    form_weights: Tensor | None = None
    """f32 `[N]`, as in `Sample`; None if it has no form."""
    trained: bool = True
    """Whether it may be trained; False if it was sampled with `trained=False`."""
    filled: bool = False
    """Whether the context, or the session's last token, ended it, and not a limit of its own."""


class TokenSampler(Protocol):
    """Answers requests, as a `Router` does."""

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        """The sample of this request; `on_part` gets its parts before. Its conversation was `begun_at` this version."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Policy:
    """Samples continuations of tokens for one episode."""

    sampler: TokenSampler
    name: str
    """The first part of its requests' ids."""
    session: str
    """Requests of one session prefer the same replica."""
    sampling: Sampling
    """The sampling parameters that a call does not override."""
    min_version: int
    """The oldest policy version that may sample its requests."""
    max_context: int
    decode: Callable[[Sequence[int]], str]
    evaluation: bool = False
    """Whether its episode is part of an evaluation."""
    seeds: str | None = None
    """Seeds each request, together with its number; None leaves the draws to the engine's own seed."""
    _requests: int = field(default=0, init=False)
    _under_way: set[asyncio.Task[Sample]] = field(default_factory=set, init=False)
    _ended: bool = field(default=False, init=False)
    _worked_seconds: float = field(default=0.0, init=False)
    _works_since: float = field(default=0.0, init=False)
    _begun_at: int | None = field(default=None, init=False)
    """The version of its first token."""
    _asked: dict[str, Sampling] = field(default_factory=dict, init=False)
    """The sampling of the request before, by what it overrode: the turns of an episode mostly ask for the same."""

    @property
    def generating(self) -> bool:
        """Whether a request is at the generator."""
        return bool(self._under_way)

    @property
    def generating_seconds(self) -> float:
        """For how long at least one of its requests was at the generator."""
        under_way = asyncio.get_running_loop().time() - self._works_since if self._under_way else 0.0
        return self._worked_seconds + under_way

    def go_on_after(self, requests: int) -> None:
        """Number the next requests after these, which the episode has made in another process."""
        self._requests = requests

    def end(self) -> None:
        """Cancel its requests and refuse further ones, because the episode has ended (generate-15)."""
        self._ended = True
        for request in self._under_way:
            request.cancel()

    def room(self, prompt: int) -> int:
        """The number of tokens that fit the context after a prompt of this length; ContextFull if it is 0."""
        if prompt < self.max_context:
            return self.max_context - prompt
        full = ContextFull if self._requests else PromptFillsContext
        limit = "generator.max_context"
        if not self.evaluation:
            limit = "the smaller of generator.max_context and backlog.row_length"
        raise full(f"{prompt} tokens leave no room in a context of {self.max_context}, {limit}")

    async def sample(
        self,
        prompt_tokens: Sequence[int],
        sampling: Sampling | None = None,
        *,
        trained: bool = True,
        most_tokens: int | None = None,
        on_part: OnPart | None = None,
        **changes: Any,
    ) -> Completion:
        """One continuation of these tokens, sampled with the run's settings, overridden by those of the call.

        `sample(tokens, max_tokens=8, stop=["\\n"])` changes only these two; the keys are the fields of `Sampling`. With
        `trained=False` a call may also change the distribution, such as `temperature=0`; record its completion with
        `Episode.observed`, because `Episode.wrote` refuses it. The answer has at most `most_tokens`, whatever it asks
        for. `on_part` gets the tokens while they are sampled, up to those of the last step."""
        if self._ended:  # generate-15
            raise self._end()
        wanted = self._wanted(sampling, changes, trained)
        prompt = tuple(prompt_tokens)
        room = self.room(len(prompt))
        if most_tokens is not None:
            room = min(room, most_tokens)
        limits = {"max_tokens": room if wanted.max_tokens is None else min(wanted.max_tokens, room)}
        if wanted.min_tokens is not None:
            limits["min_tokens"] = min(wanted.min_tokens, limits["max_tokens"])
        request_id = f"{self.name}.{self._requests}"
        if self.seeds is not None and wanted.seed is None:
            limits["seed"] = seed_of(f"{self.seeds}.{self._requests}")
        self._requests += 1
        with span("generation", request=request_id, prompt_tokens=len(prompt)) as generation:
            sample = await self._unless_ended(
                self.sampler.generate(
                    request_id,
                    list(prompt),
                    wanted.limited(limits),
                    self.min_version,
                    self.session,
                    on_part,
                    self._begun_at,
                )
            )
            if self._begun_at is None and len(sample.versions):
                self._begun_at = int(sample.versions[0])
            generation.note(tokens=len(sample.tokens))
        if sample.finish is Finish.CANCELLED:
            raise EpisodeError(f"request {request_id} was cancelled at the generator")
        return Completion(
            prompt=prompt,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish=sample.finish,
            text=self.decode(sample.tokens.tolist()),
            stop=sample.stop,
            choices=sample.choices,
            form_weights=sample.form_weights,
            trained=trained,
            filled=sample.finish is Finish.LENGTH and (wanted.max_tokens is None or wanted.max_tokens > room),
        )

    def _wanted(self, sampling: Sampling | None, changes: dict[str, Any], trained: bool) -> Sampling:
        """The sampling of a request with these overrides; raises for values that it can't have."""
        asked = f"{trained} {sampling} {changes}"
        if (known := self._asked.get(asked)) is not None:
            return known
        wanted = self.sampling.changed(sampling or Sampling()).changed(sampling_of(changes))
        if trained and not self.evaluation:
            _refuse_another_distribution(wanted, self.sampling)
        if wanted != self.sampling:
            _refuse_impossible_values(wanted)
        self._asked = {asked: wanted}
        return wanted

    async def _unless_ended(self, request: Coroutine[Any, Any, Sample]) -> Sample:
        """The sample of this request; EpisodeError if the episode ends before."""
        asked = asyncio.create_task(request)
        clock = asked.get_loop()
        if not self._under_way:
            self._works_since = clock.time()
        self._under_way.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._ended and caller is not None and not caller.cancelling():
                raise self._end() from None
            raise
        finally:
            self._under_way.discard(asked)
            if not self._under_way:
                self._worked_seconds += clock.time() - self._works_since

    def _end(self) -> EpisodeError:
        return EpisodeError(f"episode {self.name} has ended and can't sample any more")


REFUSED = {
    "include_stop_str_in_output": "the answer always includes the stop string, because tokens are never cut; "
    "`text.removesuffix(answer.stop)` removes it from the text",
    "ignore_eos": "only `stop_token_ids` end an answer; `stop_token_ids=()` lets it reach its token limit",
    "bad_words": "forbid tokens with `logit_bias={token: -100}`, in an evaluation",
    "logprobs": "every completion has the log-probability of each of its tokens",
    "n": "call `sample` once for each completion",
}
"""Parameters of vLLM that have no effect here or do not exist, and what to use instead."""


def sampling_of(changes: dict[str, Any]) -> Sampling:
    """These parameters; EpisodeError for one that does not exist, or has no effect."""
    known = sorted(parameter.name for parameter in fields(Sampling))
    unknown = {key: value for key, value in changes.items() if key not in known}
    if unknown:
        other = f"no such parameter; known are {', '.join(known)}"
        raise EpisodeError("; ".join(f"{key}={value!r}: {REFUSED.get(key, other)}" for key, value in unknown.items()))
    return Sampling(**changes)


def _refuse_impossible_values(wanted: Sampling) -> None:
    """Raise ImpossibleSampling for values that the section `sampling` refuses; vLLM silently changes some of them."""
    from goaly.base.config.check import check  # imports pydantic

    shown = repr(wanted)
    if shown in _POSSIBLE:
        return
    given = {key.name: value for key in fields(SamplingSettings) if (value := getattr(wanted, key.name)) is not None}
    given.setdefault("max_tokens", max(1, wanted.min_tokens or 0))
    if problems := check(SamplingSettings, given)[1]:
        raise ImpossibleSampling("; ".join(problems))
    if len(_POSSIBLE) >= MOST_POSSIBLE:
        _POSSIBLE.clear()
    _POSSIBLE.add(shown)


_POSSIBLE: set[str] = set()
"""Values that can work. Episodes ask with the same few in each turn, and to check them takes as long as a rendering."""
MOST_POSSIBLE = 256


def _refuse_another_distribution(wanted: Sampling, run: Sampling) -> None:  # generate-16
    ours = run.distribution
    problems = [
        f"{key}={value}: must be {ours[key]}, as in the run's sampling"
        for key, value in wanted.distribution.items()
        if value != ours[key] and key != "structured_outputs"  # whose tokens have weights
    ]
    if problems:
        raise EpisodeError(
            f"{'; '.join(problems)}: the trainer computes log-probabilities of the run's distribution only. Remove the "
            "argument, use it in evaluations only (`context.evaluation`), or sample with trained=False and record the "
            "completion with .observed()"
        )

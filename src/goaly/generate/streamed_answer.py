"""An answer that its caller gets in parts while it is sampled, and how it goes on at another replica.

The parts are the answer's tokens in their order, each once, without those of the last step: those come with the sample,
which has all of them.

    generate-12: A part that a caller has is never taken back. If its replica dies, another one continues from it; an
        answer for which that would change the distribution fails with `AnswerBroken`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from goaly.base.errors import AnswerBroken
from goaly.generate.request import Sample, Sampling, seed_of
from goaly.generate.versioned_tokens import VersionedTokens

OnPart = Callable[[VersionedTokens], None]
"""Takes the next part of an answer, in the event loop. An error that it raises fails its own request only."""


@dataclass(slots=True, eq=False)
class StreamedAnswer:
    """The parts of one request's answer so far, over all replicas that wrote them."""

    request_id: str
    on_part: OnPart
    written: VersionedTokens = field(default_factory=VersionedTokens)
    _begun: int = 0
    """The number of tokens that the replicas before the present one wrote."""

    def rest(self, prompt: list[int], sampling: Sampling, min_version: int) -> tuple[Any, ...]:
        """The arguments of `Connection.submit`, after the name, for the missing tokens. AnswerBroken if those would
        have another distribution."""
        self._begun = len(self.written.tokens)
        return [*prompt, *self.written.tokens], self._limited(sampling), min_version, self._take, self._begun

    def ended_by(self, sample: Sample) -> Sample:
        """The whole answer; `sample` has the missing tokens."""
        if not (begun := self._begun):
            return sample
        if sample.choices is not None:  # those of the beginning died with its replica
            raise self._broken("the run replays the choices of experts")
        before = self.written
        return Sample.of(
            before.tokens[:begun] + sample.tokens.tolist(),
            before.logprobs[:begun] + sample.logprobs.tolist(),
            before.versions[:begun] + sample.versions.tolist(),
            sample.finish,
            sample.stop,
        )

    def _take(self, part: VersionedTokens) -> None:
        self.written.extend(part)
        self.on_part(part)

    def _limited(self, sampling: Sampling) -> Sampling:
        written = len(self.written.tokens)
        if not written:
            return sampling
        if sampling.structured_outputs or sampling.presence_penalty or sampling.frequency_penalty:
            raise self._broken("a grammar or a penalty depends on the tokens before")
        changes: dict[str, Any] = {}
        if sampling.max_tokens is not None:
            changes["max_tokens"] = sampling.max_tokens - written
        if sampling.min_tokens is not None:
            changes["min_tokens"] = max(0, sampling.min_tokens - written)
        if sampling.seed is not None:  # with the same one, the draws of the beginning would be repeated
            changes["seed"] = seed_of(f"{sampling.seed}.{written}")
        return replace(sampling, **changes)

    def _broken(self, why: str) -> AnswerBroken:
        count = len(self.written.tokens)
        return AnswerBroken(
            f"request {self.request_id}: its generator died after {count} tokens of a streamed answer, "
            f"which cannot go on elsewhere: {why}; ask again"
        )

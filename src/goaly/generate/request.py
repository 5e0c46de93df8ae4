"""A generator's requests and samples, and the search for stop strings. Light: every process that samples imports it.

Shape suffix: N tokens that the policy wrote, the stop token included.

An answer ends with the token that completes a stop string. No token is cut, changed or taken back: text of that token
after the stop string stays in the answer.
"""

from array import array
from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goaly.generate.settings import NEUTRAL, SamplingSettings


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The policy wrote a stop token or a stop string."""
    LENGTH = "length"
    """The answer reached the token limit or the end of the context."""
    CANCELLED = "cancelled"
    """The request was cancelled; the sample has the tokens written until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request is sampled. An episode's request inherits each None from the run's `sampling`. A parameter that is
    None there too has no effect.

    Parameters without a text are those of `SamplingSettings`; `docs/episodes.md` lists those of trained answers."""

    max_tokens: int | None = None
    temperature: float | None = None
    """Divides the logits. 0 is greedy: the likeliest token, with its log-probability at temperature 1."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens. `{}` overrides the run's sampling with none."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that can be drawn. `()` overrides the run's sampling with all tokens."""
    structured_outputs: Mapping[str, Any] | None = None
    """The form of the answer's text: one of `json`, `json_object`, `regex`, `choice`, `grammar` and
    `structural_tag`, as in vLLM's `StructuredOutputsParams`. With a reasoning parser it begins after the reasoning,
    unless the prompt ends it, or the answer has none: `at_once=True`. `template_args` override
    `chat.template_args` for that parser."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer, searched for in its whole text, special tokens included. The tokens of that text
    stay in the answer. The last one stays whole even if the text ends inside it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the answer and are its last token. They replace the run's, which are the model's own by
    default."""
    seed: int | None = None
    """Makes the draw repeatable. Give each sample of a group its own seed, or all samples are the same."""

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        listed = {"stop": stop, "stop_token_ids": self.stop_token_ids, "allowed_token_ids": self.allowed_token_ids}
        for key, value in listed.items():
            object.__setattr__(self, key, None if value is None else tuple(value))
        if self.stop is not None and not all(self.stop):
            raise ValueError(f"stop={self.stop}: must not have empty texts")
        for text in self.stop or ():
            text.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair: no answer has one

    @classmethod
    def of(cls, settings: SamplingSettings, stop_token_ids: Sequence[int]) -> "Sampling":
        """The sampling of these settings. They get the model's stop tokens if they name none."""
        chosen: dict[str, Any] = asdict(settings)
        if chosen["stop_token_ids"] is None:
            chosen["stop_token_ids"] = stop_token_ids
        return cls(**chosen)

    def changed(self, changes: "Sampling") -> "Sampling":
        """This sampling with the parameters that `changes` sets."""
        named = {key.name: value for key in fields(changes) if (value := getattr(changes, key.name)) is not None}
        return replace(self, **named)

    def limited(self, limits: Mapping[str, int]) -> "Sampling":
        """This sampling with these values, which are possible ones."""
        if all(getattr(self, key) == value for key, value in limits.items()):
            return self
        return replace(self, **limits)

    @property
    def distribution(self) -> dict[str, Any]:
        """The parameters that decide the distribution that tokens are drawn from: every key of `NEUTRAL`."""
        given = {key: getattr(self, key) for key in NEUTRAL}
        return {key: NEUTRAL[key] if value in (None, {}, ()) else value for key, value in given.items()}


def seed_of(name: str) -> int:
    """A seed for the request of this name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big")


def evaluation_seeds(seed: int, policy_version: int, prompt_id: str) -> str:
    """The start of the names of an evaluation's requests with this prompt: their seeds are the same each time."""
    return f"{seed}/evaluation/{policy_version}/{prompt_id}"


AT_ONCE = "at_once"
"""The key of structured outputs that says whether they begin with the first token, or after the reasoning."""
TEMPLATE_ARGS = "template_args"
"""The key of structured outputs with the chat template's arguments, which the parser of reasoning reads."""


class InvalidRequest(ValueError):
    """A request that no generator can serve."""


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for an answer in the generator's context."""


def check_prompt(request_id: str, prompt: list[int], *, vocabulary: int, max_context: int) -> None:
    """Raise PromptTooLong if the prompt leaves no room for an answer, and InvalidRequest if it is invalid otherwise."""
    if not prompt:
        raise InvalidRequest(f"request {request_id}: the prompt is empty, must have at least one token")
    if len(prompt) >= max_context:
        raise PromptTooLong(
            f"request {request_id}: the prompt has {len(prompt)} tokens, must have fewer than "
            f"generator.max_context={max_context}"
        )
    try:
        ids = array("q", prompt)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"request {request_id}: the prompt's token ids must be integers: {error}") from None
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary:
            raise InvalidRequest(
                f"request {request_id}: token id {token} at position {ids.index(token)} of the prompt is not in the "
                f"model's vocabulary, must be at least 0 and below {vocabulary}"
            )


def duplicate_request(request_id: str) -> ValueError:
    """The error of a request whose id another running request has."""
    return ValueError(f"request_id={request_id!r}: another running request has this id; ids must be unique")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it travels to a replica."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    min_version: int
    streams: bool = False
    """Whether the client gets the answer's parts while it is sampled (`streamed_answer.py`)."""
    written: int = 0
    """The number of the prompt's last tokens that begin the answer; another replica wrote them."""
    begun_at: int | None = None
    """The version under which its conversation began; None: it begins with this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An answer of the policy: token ids, and the log-probability and the policy version of each."""

    tokens: Tensor
    """i64 `[N]`."""
    logprobs: Tensor
    """f32 `[N]`, under the distribution that was drawn from: after temperature, penalties, top-p and all else, but not
    after a form. A greedy sample has those of the distribution at temperature 1 (`tests/characterization` pins it)."""
    versions: Tensor
    """i32 `[N]`: the policy version whose weights produced the token's logits."""
    finish: Finish
    stop: str | None = None
    """The stop string that ended the answer; None: something else ended it."""
    choices: Tensor | None = None
    """u8 `[tokens, layers, K]`: the experts that were chosen for each token of the prompt and the answer but the last,
    which is not computed; None if the generator does not record them."""
    form_weights: Tensor | None = None
    """f32 `[N]`, from 0 to 1: the probability of each token without the answer's form, divided by the one with which it
    was drawn; None if the answer has no form."""

    @classmethod
    def of(
        cls,
        tokens: list[int],
        logprobs: list[float],
        versions: list[int],
        finish: Finish,
        stop: str | None = None,
        choices: Tensor | None = None,
        form_weights: list[float] | None = None,
    ) -> "Sample":
        """The sample of these columns."""
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            versions=torch.tensor(versions, dtype=torch.int32),
            finish=finish,
            stop=stop,
            choices=choices,
            form_weights=None if form_weights is None else torch.tensor(form_weights, dtype=torch.float32),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain bytes: to pickle three small tensors takes longer than to decode some tokens.
        columns = (self.tokens, self.logprobs, self.versions)
        weights, choices = (None if one is None else one.numpy().tobytes() for one in (self.form_weights, self.choices))
        shape = () if self.choices is None else tuple(self.choices.shape)
        known = (*(column.numpy().tobytes() for column in columns), self.finish.value, self.stop)
        return _unpickled, known if weights is choices is None else (*known, weights, choices, shape)


def _unpickled(
    tokens: bytes,
    logprobs: bytes,
    versions: bytes,
    finish: str,
    stop: str | None,
    form_weights: bytes | None = None,
    choices: bytes | None = None,
    shape: tuple[int, ...] = (),
) -> Sample:
    def column(raw: bytes, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    return Sample(
        tokens=column(tokens, torch.int64),
        logprobs=column(logprobs, torch.float32),
        versions=column(versions, torch.int32),
        finish=Finish(finish),
        stop=stop,
        choices=None if choices is None else column(choices, torch.uint8).view(shape),
        form_weights=None if form_weights is None else column(form_weights, torch.float32),
    )


def settle(future: Future[Any], result: object) -> None:
    """Give a request's future its sample or its error, unless it has ended."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(slots=True, kw_only=True)
class GeneratorStats:
    """A replica's counts since its start."""

    version: int = 0
    running: int = 0
    """Requests that the engine decodes or prefills."""
    waiting: int = 0
    """Requests that wait for newer weights, or for room in the engine."""
    queued: int = 0
    """Those of them that wait for room."""
    max_running: int = 0
    """The present limit of requests in the engine."""
    cache_use: float = 0.0
    """The share of the key-value cache that running requests use."""
    preemptions: int = 0
    """How often a full cache interrupted a request, which is computed again later."""
    tokens: int = 0
    """Tokens of the answers that have ended."""
    steps: int = 0
    busy_seconds: float = 0.0
    """Time inside engine steps."""
    running_seconds: float = 0.0
    """Sum of the engine steps' seconds, each times the number of its requests."""
    cache_seconds: float = 0.0
    """Sum of the engine steps' seconds, each times the share of the cache in use."""
    updates: int = 0
    """Weight versions applied."""
    verified_updates: int = 0
    """How many of them were compared with the trainer's digest (`weights/digest.py`)."""
    stall_seconds: float = 0.0
    """Time for which decoding stopped to apply weights."""


CONTEXT_TOKENS = 6
"""Tokens of the prompt that are decoded together with the first token: some tokenizers decode the first word of a text
differently."""
LONGEST_CHARACTER = 4
"""Bytes of the longest character: a character is spread over at most as many tokens."""
INCOMPLETE = "\ufffd"
"""Decoded in place of an incomplete character."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes one answer while it is written."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        """`before` are the tokens before the answer."""
        self._decode = decode
        self._window = list(before)
        self._read = len(self._window)

    def wrote(self, *tokens: int) -> str:
        """The text that these tokens add to the answer; empty while a character is incomplete."""
        window = [*self._window, *tokens]
        text = self._decode(window)
        if text.endswith(INCOMPLETE) and len(tokens) > 1:
            return "".join(map(self.wrote, tokens))
        if text.endswith(INCOMPLETE) and len(window) - self._read < LONGEST_CHARACTER:
            self._window = window
            return ""
        before = self._decode(window[: self._read])
        self._window = window[self._read :]
        self._read = len(self._window)
        return text[len(before) :]


class StopStrings:
    """Searches one answer for stop strings while it is written. (vLLM does so in its front end, which is not used
    here.)"""

    def __init__(self, stops: Sequence[str], decode: Decode, prompt: Sequence[int], min_tokens: int = 0):
        """No stop string ends an answer of `min_tokens` or fewer, as in vLLM. `decode` must keep special tokens."""
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops))
        self._text = Detokenizer(decode, prompt[-CONTEXT_TOKENS:])
        self._tail = ""
        self._written = 0

    def wrote(self, token: int) -> str | None:
        """Add the answer's next token; returns the stop string that it completes, if it does."""
        self._written += 1
        new = self._text.wrote(token)
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        if self._written <= self._min_tokens:
            return None
        ends = {}
        for stop in self._stops:
            at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
            if at >= 0:
                ends[stop] = at + len(stop)
        return min(ends, key=ends.__getitem__, default=None)


@cache
def decoder(folder: str) -> Decode:
    """The decode function of a model folder's tokenizer. It keeps special tokens. ValueError if there is no
    tokenizer."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"stop: {folder} has no tokenizer.json, and stop strings need a tokenizer; use stop_token_ids")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)

"""A session as agents reach it by HTTP: it answers requests, knows retries, and keeps rewards that agents send.

Requests that are merely equal each get answers of their own. A request that no client waits for any more is cancelled
at the generator, and not recorded. The id of a response is that of its call, of its session, and of no other. Only its
clients know it.

Invariants
    agents-6: A retry of a request gets the answers of that request, and adds nothing. So does a request that is sent
        again because the client lost the answer.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, NamedTuple

from goaly.agents.answer_parser import AnswerParser, ToolChoice
from goaly.agents.answer_stream import AnswerStream, Piece, Reader
from goaly.agents.refusals import Refusal
from goaly.agents.session import Session
from goaly.agents.settings import UntrainedSettings
from goaly.agents.turn import Continuation, RecordedTurn
from goaly.base.errors import first_error
from goaly.generate.policy import Completion, ContextFull, Policy
from goaly.generate.request import Sampling, seed_of
from goaly.generate.settings import NEUTRAL
from goaly.prompts.prompt import ASSISTANT, Message

logger = logging.getLogger(__name__)

_TOLD: set[str] = set()
"""Sampling parameters of clients that this process has warned of."""


class _State(Enum):
    UNDER_WAY = auto()
    DELIVERED = auto()
    LOST = auto()
    """The client went away before it had the answer."""


class Repeats(NamedTuple):
    """The headers of a request about earlier attempts."""

    retries: int = 0
    """How often the client has sent it before."""
    idempotency_key: str | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client, and its retries."""

    key: str
    """The first part of the keys of its turns."""
    request: str
    """The digest of what it asks for."""
    id: str
    """The last part of the id of the response: all retries get the same, and no other call does."""
    state: _State = _State.UNDER_WAY
    waiting: int = 0
    """Clients that wait for its answers now."""
    work: "asyncio.Task[list[RecordedTurn]] | None" = None
    streams: dict[int, AnswerStream] = field(default_factory=dict)
    """The answers that are sampled now, by their numbers, if clients get them in parts."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a stream or the work goes on; then there is another one."""

    def changes(self, *_: object) -> None:
        """Wake those that wait for the next piece, or the end."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The request of a call."""

    continuation: Continuation
    tools: Sequence[Mapping[str, Any]]
    given: Mapping[str, Any]
    """The sampling parameters that the client names, by their names in `Sampling`."""
    answers: int = 1
    plain: bool = False
    """Whether the answer is only text, and continues a text."""
    choice: ToolChoice = "auto"
    one_call: bool = False
    """Whether all tool calls but the first are dropped from each answer."""
    structured_outputs: Mapping[str, Any] | None = None
    """The form that the answers must have, as in `Sampling`."""
    streams: bool = False
    """Whether the client gets the answers in parts."""
    trained: bool = True


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request under way."""

    http_session: "HttpSession"
    call: Call | None
    """None if it samples nothing."""
    trained: bool = True
    """Whether its answers are."""
    is_read: bool = False
    """Whether the serving code has read the request. Until then nothing but the request itself can fail."""
    ask: Ask | None = None
    returned: list[RecordedTurn] = field(default_factory=list)
    """Its answers that the serving code has not read yet."""
    delta: Any = None
    """The part that the serving code sends next in a stream, as vLLM's `DeltaMessage`."""


EXCHANGE: ContextVar[Exchange] = ContextVar("EXCHANGE")
"""The exchange of this task. vLLM's serving classes have no argument for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class HttpSession:
    """One episode's session, for the agents that have its key."""

    session: Session
    policy: Policy
    parser: AnswerParser
    secret: str
    """Makes the ids of its responses differ from those of all other sessions, and unguessable for others' clients. A
    session that goes on in another worker keeps it."""
    untrained: UntrainedSettings = field(default_factory=UntrainedSettings)
    """The requests that are not trained."""
    _calls: dict[str, Call] = field(default_factory=dict, init=False)
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    _by_id: dict[str, Call] = field(default_factory=dict, init=False)

    @property
    def id(self) -> str:
        """The name of the session in URLs."""
        return self.policy.name

    def __post_init__(self) -> None:
        for recorded in self.session.keys:  # by an earlier worker, whose answers may not have arrived
            key = recorded.partition("/")[0]
            request, dot, count = key.rpartition(".")
            if key not in self._calls:
                self._new_call(key, request).state = _State.LOST
                if dot:
                    self._counts[request] = max(self._counts.get(request, 0), int(count))

    def call(self, path: str, body: bytes, repeats: Repeats) -> Call:
        """The call of an HTTP request: a new one, or the one that it repeats (agents-6)."""
        retries, idempotency_key = repeats
        request = request_digest(path, body)
        if idempotency_key is not None:
            key = blake2b(idempotency_key.encode(), digest_size=16).hexdigest()
            known = self._calls.get(key)
            if known is not None and known.request not in (request, ""):
                used = f"Idempotency-Key={idempotency_key}: was sent with another request, must be of one request"
                raise Refusal(used, HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_key_reused")
            return known or self._new_call(key, request)
        earlier = [call for call in self._calls.values() if call.request == request]
        lost = [call for call in earlier if call.state is _State.LOST]
        if lost:
            lost[0].state = _State.UNDER_WAY  # an equal request gets the next one
            return lost[0]
        if retries and earlier:
            return next((call for call in earlier if call.state is _State.UNDER_WAY), earlier[-1])
        count = self._counts[request] = self._counts.get(request, 0) + 1
        return self._new_call(f"{request}.{count}", request)

    def ended(self, call: Call, *, delivered: bool) -> None:
        """An HTTP request of the call has ended; `delivered`: the client has the whole response. After a refusal it has
        nothing to repeat: a retry is answered as if it were the first request."""
        is_answered = bool(self.recorded(call)) or call.key in self.session.rewarded
        if delivered and is_answered:
            call.state = _State.DELIVERED
        elif call.state is _State.UNDER_WAY and call.waiting == 0:
            call.state = _State.LOST

    def check_room(self, call: Call | None, tokens: int, parameter: str, *, trained: bool = True) -> None:
        """Refuse a call whose prompt, which has this many tokens, fills the context; the session is marked, unless the
        call is not trained. The text is the one by which clients of Anthropic's API, which has no codes, know it."""
        if call is None or self.recorded(call):
            return
        try:
            with self.session.sampling(0, trained=trained):
                self.policy.room(tokens)
        except ContextFull as error:
            too_long = f"prompt is too long: {tokens} tokens > {self.policy.max_context - 1} maximum; {error}"
            raise Refusal(too_long, HTTPStatus.BAD_REQUEST, "context_length_exceeded", parameter) from error

    async def answers(self, call: Call, ask: Ask) -> list[RecordedTurn]:
        """The turns that answer this call: those that it had before, or new ones."""
        if len(recorded := self.recorded(call)) >= ask.answers:
            return recorded
        with self._work(call, ask) as work:
            return await asyncio.shield(work)

    async def pieces(self, call: Call, ask: Ask) -> AsyncGenerator[tuple[int, Piece]]:
        """The answers of this call in pieces, each with the answer's number: what there is already, and the others when
        they are sampled."""
        readers = [Reader() for _ in range(ask.answers)]
        turns = self.recorded(call)
        if len(turns) < ask.answers:
            with self._work(call, ask) as work:
                while not work.done():
                    changed = call.changed
                    for number, stream in call.streams.items():
                        if (piece := readers[number].take(stream.pieces)) is not None:
                            yield number, piece
                    await changed.wait()  # a piece, or the end of the work
                turns = work.result()
        for number, (reader, turn) in enumerate(zip(readers, turns, strict=False)):
            yield number, reader.rest(turn)

    @contextmanager
    def _work(self, call: Call, ask: Ask) -> Iterator["asyncio.Task[list[RecordedTurn]]"]:
        """The sampling of the call's answers, which lives as long as one client waits for it."""
        if call.work is None:
            call.work = asyncio.create_task(self._sampled(call, ask), name=f"call {call.id}")
            call.work.add_done_callback(call.changes)
        work = call.work
        call.waiting += 1
        try:
            yield work
        finally:
            call.waiting -= 1
            if not work.done() and call.waiting == 0:
                work.cancel()
            if call.work is work and (work.done() or call.waiting == 0):  # a retry may have begun another one
                call.work, call.streams = None, {}

    def recorded(self, call: Call) -> list[RecordedTurn]:
        """The turns that answered the call; none if it has not been answered."""
        found = []
        while (turn := self.session.turn_of(f"{call.key}/{len(found)}")) is not None:
            found.append(turn)
        return found

    def answered(self, response_id: str) -> list[RecordedTurn]:
        """The turns of the response with this id; none if this session has sent no such response."""
        call = self._by_id.get(response_id.rpartition("-")[2].rpartition("_")[2])
        return [] if call is None else self.recorded(call)

    def fingerprint(self, call: Call | None) -> str | None:
        """The name of the policy version that answers this call, for `system_fingerprint`; None names none."""
        return None

    def close(self) -> None:
        """Cancel the requests under way: the episode has ended."""
        for call in self._calls.values():
            if call.work is not None:
                call.work.cancel()

    def _new_call(self, key: str, request: str) -> Call:
        made = blake2b(key.encode(), key=self.secret.encode(), digest_size=12).hexdigest()
        call = self._calls[key] = Call(key, request, made)
        self._by_id[call.id] = call
        return call

    async def _sampled(self, call: Call, ask: Ask) -> list[RecordedTurn]:
        known = self.recorded(call)  # fewer than it asks for, if a worker died between two records
        with self.session.sampling(ask.answers - len(known), trained=ask.trained):
            sampling, numbers = self._sampling(ask), range(len(known), ask.answers)
            if ask.streams:
                call.streams = {number: self._stream(call, ask, sampling) for number in numbers}
            streams = [call.streams.get(number) for number in numbers]
            try:
                async with asyncio.TaskGroup() as samples:
                    sampled = [
                        samples.create_task(
                            self.policy.sample(
                                ask.continuation.prompt,
                                sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number),
                                trained=ask.trained,
                                most_tokens=self.session.tokens_left,
                                on_part=None if stream is None else stream.wrote,
                            )
                        )
                        for number, stream in zip(numbers, streams, strict=True)
                    ]
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors
            return known + [
                self._record(call, ask, number, one.result(), stream)
                for number, one, stream in zip(numbers, sampled, streams, strict=True)
            ]

    def _stream(self, call: Call, ask: Ask, sampling: Sampling) -> AnswerStream:
        return self.parser.stream(
            ask.tools,
            choice=ask.choice,
            plain=ask.plain,
            stops=self.policy.sampling.changed(sampling).stop or (),
            on_piece=call.changes,
            template_args=ask.continuation.request.template_args,
        )

    def _record(
        self, call: Call, ask: Ask, number: int, completion: Completion, stream: AnswerStream | None
    ) -> RecordedTurn:
        if ask.plain:
            message = Message(role=ASSISTANT, content=self.parser.text(completion))
        else:
            message = self.parser.message(
                completion,
                ask.tools,
                choice=ask.choice,
                one_call=ask.one_call,
                template_args=ask.continuation.request.template_args,
            )
        if stream is not None:
            message = self.parser.as_shown(message, completion, stream)
        malformed = self.parser.malformed_calls(message, completion, ask.tools, ask.choice)
        key = f"{call.key}/{number}"
        return self.session.record(ask.continuation, completion, message.as_dict(), key, malformed=malformed)

    def _sampling(self, ask: Ask) -> Sampling:
        """The sampling that a client asks for. Trained answers keep the run's distribution, but for the form that they
        must have, and a seed is that of one episode."""
        given, kept = ask.given, dict(ask.given)
        if ask.trained and not self.policy.evaluation:
            run, asked = self.policy.sampling.distribution, Sampling(**given).distribution
            changed = {key for key in NEUTRAL if key in given and asked[key] != run[key]}
            if changed:  # generate-16
                self.session.overridden_requests += 1
                if new := changed - _TOLD:
                    _TOLD.update(new)
                    logger.warning("agents name %s: trained answers have the run's instead", ", ".join(sorted(new)))
            kept = {key: value for key, value in given.items() if key not in changed}
            if (seed := kept.get("seed")) is not None:  # or an agent's constant one would make a group's samples equal
                kept["seed"] = seed_of(f"{seed}.{self.policy.name}")
        return Sampling(**kept, structured_outputs=ask.structured_outputs)


def request_digest(path: str, body: bytes) -> str:
    """The same for equal requests."""
    return blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()

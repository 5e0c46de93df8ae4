"""Live traffic: finds the session of each request, records its answer, and hears what the next message says.

The sessions of a key are trees of `goaly.agents`. A request continues the session that has recorded the conversation
which its messages begin with, or the one that the client names; otherwise it begins one. Nothing of one key is found
by another (live-25).

A turn is recorded if its key is trained, its request has not opted out, it was drawn from the run's distribution (or a
form's, whose tokens have weights), and the redaction hook leaves its texts as they are. All others are served, and
counted in `left_out`.

Invariants
    live-25: A request continues no session, and reaches no turn, of another key than its own.
    live-26: Nothing is written of a request with a key that is not trained, or that opted out, or that the redaction
        hook changes.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from goaly.agents.conversation import Conversation
from goaly.agents.session import Session
from goaly.agents.turn import Continuation, RecordedTurn
from goaly.generate.policy import Completion
from goaly.live.collection import Collection, CollectionLimits, Record, read
from goaly.live.log import LiveLog
from goaly.live.turn import Reaction, ReactionKind, TurnEnd
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.template import text_of
from goaly.prompts.tokenizer import ChatTokenizer, Room

logger = logging.getLogger(__name__)

Redact = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The sender of a request."""

    key: str
    """The name of its API key."""
    session: str | None = None
    """Its name for the session; None leaves it to the conversation."""
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlace:
    """Where a request goes on: a session, and its tree."""

    session: str
    tree: Session
    continuation: Continuation


@dataclass(slots=True, kw_only=True, eq=False)
class Traffic:
    """The sessions of all keys, over the collection of their turns."""

    chat: ChatTokenizer
    limits: CollectionLimits
    log: LiveLog
    row_length: int
    """Most tokens of a conversation that is trained."""
    clock: Callable[[], float]
    redact: Redact | None = None
    collection: Collection = field(init=False)
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers that were served and not recorded, by their reason."""
    newest: int = 0
    """The newest policy version that has answered."""
    broken: str | None = None
    """Why nothing is recorded any more; None while it is."""
    on_change: Callable[[], None] = lambda: None
    _trees: dict[str, Session] = field(default_factory=dict)
    _turns: dict[str, RecordedTurn] = field(default_factory=dict)
    """The tokens and messages of turns that have not ended."""
    _by_digest: dict[tuple[str, bytes], list[tuple[str, int]]] = field(default_factory=dict)
    """The sessions and turns that a conversation ends with, by key and digest."""
    _by_name: dict[tuple[str, str], str] = field(default_factory=dict)
    _continued: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        contents: dict[str, list[Record]] = {}

        def kept() -> Iterator[Record]:
            for record in self.log.records():
                if record["kind"] == "turn":
                    contents.setdefault(record["session"], []).append(record)
                yield record

        self.collection = read(self.limits, kept(), self._write)
        for name, session in self.collection.sessions.items():
            records = sorted(contents.get(name, ()), key=lambda record: record["n"])
            tree = Session(self.chat, prompt_id=name).replay(record["content"] for record in records)
            for record, turn in zip(records, tree.turns, strict=True):
                self._know(name, session.key, record["turn"], tree, turn)
            if session.closed is None:
                self._trees[name] = tree
                if session.name is not None:
                    self._by_name[session.key, session.name] = name
        self.sweep()

    def place(
        self,
        client: Client,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
        room: Room | None,
    ) -> RequestPlace:
        """Where a request goes on. Records nothing."""
        request = Conversation.of(messages, tools, template_args)
        session = self._session_of(client, request)
        if session is None:
            session = secrets.token_hex(8)
            tree = Session(self.chat, prompt_id=session)
        else:
            tree = self._trees[session]
        return RequestPlace(session=session, tree=tree, continuation=tree.extend(messages, tools, template_args, room))

    def said(self, place: RequestPlace) -> None:
        """Hear what a new request says of the turns before it: the one that it continues, and those that answered the
        same request, or another one in its place."""
        now, going_on, request = self.clock(), place.continuation, place.continuation.request
        parent = going_on.parent or place.tree.deepest(request)[0]  # the template may not continue its answer
        known = 0 if parent is None else len(parent.conversation.messages)
        for turn in place.tree.turns:
            if turn.parent is not going_on.parent or place.session not in self._trees:
                continue
            again = turn.request.digests == request.digests
            if going_on.parent is None and not again:
                continue  # another conversation
            kind = ReactionKind.RETRY if again else ReactionKind.EDIT
            self._hear(place.session, turn, Reaction(kind=kind, text=_texts(request.messages[known:])), now)
        if parent is not None and (new := request.messages[known:]):
            is_tool = new[0].role == "tool"
            kind = ReactionKind.TOOL_RESULT if is_tool else ReactionKind.REPLY
            answering = [
                message for message in new if is_tool == (message.role == "tool") and message.role != ASSISTANT
            ]
            self._hear(place.session, parent, Reaction(kind=kind, text=_texts(answering)), now)

    def record(
        self,
        client: Client,
        place: RequestPlace,
        completion: Completion,
        message: Mapping[str, Any],
        *,
        response: str,
        malformed: int,
        reason: str | None,
    ) -> RecordedTurn | None:
        """Record an answer; None if it is not to be, for this `reason` or another."""
        if len(completion.versions):
            self.newest = max(self.newest, int(completion.versions.max()))
        known = self.collection.sessions.get(place.session)
        if known is not None and (known.closed is not None or place.session not in self._trees):
            reason = reason or "session_ended"
        if reason is None and self._is_changed(place, message):
            reason = "redacted"
        if reason is None and self.broken is not None:
            reason = "not_written"
        if reason is not None:
            self.left_out[reason] += 1
            return None
        now = self.clock()
        turn = place.tree.record(place.continuation, completion, message, malformed=malformed)
        if known is None:
            self.collection.begin(place.session, client.key, now, user=client.user, name=client.session)
            self._trees[place.session] = place.tree
            if client.session is not None:
                self._by_name[client.key, client.session] = place.session
        name = f"{place.session}.{turn.number}"
        trained = turn.versions if turn.logprobs.isfinite().any() else turn.versions[:0]
        length = len(place.continuation.prompt) + len(turn.tokens)
        left_out = TurnEnd.TOO_LONG if length > self.row_length else None if len(trained) else TurnEnd.NO_TOKENS
        self._know(place.session, client.key, name, place.tree, turn)
        self.collection.add(
            place.session,
            turn.record(),
            now,
            response=response,
            siblings=f"{client.key}/{turn.request.digests[-1].hex()}",
            version=int(trained.min()) if len(trained) else 0,
            malformed=malformed,
            left_out=left_out,
        )
        self.on_change()
        return turn

    def feedback(self, key: str, session: str, response: str | None, reaction: Reaction) -> int | None:
        """Give a client's feedback to the turns of a response, or to all turns of the session without a reward; their
        number. None if this key has no such session or response."""
        if response is not None:
            turns = self.collection.of_response(key, response)
            known = [turn for turn in turns if session in ("own", self.collection.turns[turn].session)]
        else:
            found = self.collection.sessions.get(session)
            if found is None or found.key != key:  # live-25
                return None
            known = self.collection.open_turns(session)
        if response is not None and not known:
            return None
        for turn in known:
            self._hear_of(turn, reaction, self.clock())
        return len(known)

    def end(self, key: str, session: str) -> bool:
        """End a session, as its client asks; False if this key has none of this id."""
        found = self.collection.sessions.get(session)
        if found is None or found.key != key:  # live-25
            return False
        self.collection.close(session, "end")
        self.sweep()
        return True

    def sweep(self) -> None:
        """End what has waited for too long, and forget what is over."""
        if self.broken is None:
            self.collection.tick(self.clock())
        gone = [name for name in self._trees if self._is_over(name)]
        for name in gone:
            del self._trees[name]
        self._turns = {name: turn for name, turn in self._turns.items() if name in self.collection.turns}
        if gone:
            self._by_name = {client: name for client, name in self._by_name.items() if name in self._trees}
            self._continued = {one for one in self._continued if one[0] in self._trees}
            left = {key: [one for one in those if one[0] in self._trees] for key, those in self._by_digest.items()}
            self._by_digest = {key: those for key, those in left.items() if those}
        while self.collection.dropped and self.broken is None:
            self.log.drop(self.collection.dropped.pop())

    def turn(self, name: str) -> RecordedTurn:
        """The tokens and messages of a turn that has not ended."""
        return self._turns[name]

    def _session_of(self, client: Client, request: Conversation) -> str | None:
        if client.session is not None:
            named = self._by_name.get((client.key, client.session))
            return None if named is None or self._is_over(named) else named
        for at in reversed(range(len(request.digests))):
            if request.messages[at].role == ASSISTANT:
                found = self._by_digest.get((client.key, request.digests[at]), ())  # live-25
                alive = [one for one in found if one[0] in self._trees and not self._is_over(one[0])]
                if alive:
                    return next((one for one in alive if one not in self._continued), alive[-1])[0]
        return None

    def _know(self, session: str, key: str, name: str, tree: Session, turn: RecordedTurn) -> None:
        self._turns[name] = turn
        self._by_digest.setdefault((key, turn.conversation.digests[-1]), []).append((session, turn.number))
        if (parent := turn.parent or tree.deepest(turn.request)[0]) is not None:
            self._continued.add((session, parent.number))

    def _hear(self, session: str, turn: RecordedTurn, reaction: Reaction, now: float) -> None:
        name = f"{session}.{turn.number}"
        found = self.collection.turns.get(name)
        if found is not None and reaction not in found.reactions:  # an SDK may send a request again
            self._hear_of(name, reaction, now)

    def _hear_of(self, name: str, reaction: Reaction, now: float) -> None:
        if self.broken is not None:
            return
        if self.redact is not None and reaction.text is not None:
            changed: dict[str, Any] = {"kind": reaction.kind, "score": reaction.score}
            corrected = None if reaction.corrected is None else self.redact(reaction.corrected)
            reaction = Reaction(text=self.redact(reaction.text), corrected=corrected, **changed)
        turn = self._turns.get(name)
        answer = None if turn is None else text_of(turn.answer.content or "")
        self.collection.hear(name, reaction, now, answer=answer)
        self.on_change()

    def _is_changed(self, place: RequestPlace, message: Mapping[str, Any]) -> bool:
        """Whether the redaction hook changes a text that this turn would add."""
        if self.redact is None:
            return False
        going_on = place.continuation
        known = 0 if going_on.parent is None else len(going_on.parent.conversation.messages)
        said = [*going_on.request.messages[known:], Message.of({**message, "role": ASSISTANT})]
        texts = [text for each in said for text in _all_texts(each.as_dict())]
        return any(self.redact(text) != text for text in texts)

    def _is_over(self, session: str) -> bool:
        found = self.collection.sessions.get(session)
        return found is None or found.closed is not None

    def _write(self, record: Record) -> None:
        try:
            self.log.write(record)
        except OSError as error:
            if self.broken is None:
                logger.error("nothing of live traffic is recorded or trained any more: %s", error)
            self.broken = str(error)


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(text_of(message.content or "") for message in messages)


def _all_texts(value: Any) -> Iterator[str]:
    """All texts in this JSON, keys left out."""
    match value:
        case str():
            yield value
        case Mapping():
            for inner in value.values():
                yield from _all_texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _all_texts(inner)

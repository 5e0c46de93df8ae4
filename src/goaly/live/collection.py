"""The collection: every turn of live traffic from its answer to its end. Pure: the time is an argument.

Each change is a record. `apply` makes the change of a record, for new ones and for those that a restart reads, so a
collection that read the records equals the one that wrote them. Nothing here waits.

Memory is bounded: with `most_turns` alive, the oldest turn without a reward goes, and if all have one, the oldest that
is not in a group. Turns in groups are bounded by admission (backlog-1). Sessions that go on have at most as many turns,
or the one that was not used for the longest time ends.

Invariants
    live-21: Each recorded turn ends once, as trained or left out with a reason, and `recorded == alive + sum(ended)`
        after every change.
    live-22: A turn is in the group of at most one ticket. A ticket that asks again, because its worker died, gets the
        same turns.
    live-23: A turn without an outcome, or whose judge failed, is never trained, and has no reward. One without a reward
        is trained only by a teacher that sees what was said about it.
    live-24: A collection that applies the records of another one equals it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from goaly.live.baselines import Baselines
from goaly.live.turn import LiveTurn, Reaction, ReactionKind, TurnEnd, TurnStage

HINT = "hint"
"""The judge of a turn that only a teacher trains."""
Record = dict[str, Any]
"""A change of the collection; `json.dumps` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionLimits:
    """Bounds of time and memory."""

    most_turns: int = 10_000
    idle_seconds: float = 1800.0
    session_turns: int = 256
    outcome_seconds: float = 3600.0
    batch_seconds: float = 30.0
    judge_tries: int = 3
    hints_alone: bool = False
    """Whether a text that is said about a turn is enough to train it, by a teacher that sees the text."""
    rewards: Mapping[ReactionKind, float] = field(default_factory=dict)
    """The rewards of outcomes that need no judge, by their kinds."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSession:
    """A conversation that is recorded."""

    id: str
    key: str
    user: str | None
    name: str | None
    """The client's name for it."""
    used_at: float
    turns: int = 0
    alive: int = 0
    """Its turns that have not ended."""
    closed: str | None = None
    """How it ended; None while it goes on."""


class Collection:
    """The sessions that go on, and the turns that have not ended."""

    def __init__(self, limits: CollectionLimits, write: Callable[[Record], None] = lambda record: None):
        """`write` gets each record before any caller does."""
        self.limits = limits
        self.write = write
        self.sessions: dict[str, LiveSession] = {}
        """Those that go on, or have turns that have not ended."""
        self.turns: dict[str, LiveTurn] = {}
        """Those that have not ended, the oldest first."""
        self.recorded = 0
        self.ended: Counter[TurnEnd] = Counter()
        self.counts: Counter[str] = Counter()
        """Late outcomes, failures of the judge, closed sessions."""
        self.baselines = Baselines()
        self.same_weights: dict[int, int] = {}
        """The version that counts for tokens of another one, after the trainer has gone back to that one's weights."""
        self.dropped: list[str] = []
        """Sessions that are over: their last turn has ended. The caller takes them."""
        self._changes = self._held = 0  # the turns of the sessions that go on
        self._by_response: dict[tuple[str, str], list[str]] = {}
        self._by_ticket: dict[int, list[str]] = {}
        self._stages: dict[TurnStage, dict[str, LiveTurn]] = {stage: {} for stage in TurnStage}

    # What happens.

    def begin(self, session: str, key: str, now: float, *, user: str | None = None, name: str | None = None) -> None:
        """Begin a session of this key."""
        self._do({"kind": "session", "session": session, "key": key, "user": user, "name": name, "at": now})

    def add(
        self,
        session: str,
        content: Any,
        now: float,
        *,
        response: str,
        siblings: str,
        version: int,
        malformed: int = 0,
        left_out: TurnEnd | None = None,
    ) -> str:
        """Record a turn of this session; its id. One that is `left_out` ends at once."""
        turn = f"{session}.{self.sessions[session].turns}"
        facts = {"response": response, "siblings": siblings, "version": version}
        self._do({"kind": "turn", "session": session, "turn": turn, "at": now, "content": content, **facts})
        if left_out is not None:
            self._end(turn, left_out)
        elif malformed and ReactionKind.MALFORMED in self.limits.rewards:
            self.hear(turn, Reaction(kind=ReactionKind.MALFORMED), now)
        self._make_room()
        self._make_room_for_sessions(session)
        if self.sessions[session].turns >= self.limits.session_turns:
            self.close(session, "size")
        return turn

    def hear(self, turn: str, outcome: Reaction, now: float, *, answer: str | None = None) -> bool:
        """Add an outcome of a turn, whose `answer` a correction is compared with. False if it comes too late: the turn
        has ended, is in a group, or has a reward that this outcome does not replace."""
        found = self.turns.get(turn)
        reward = self._reward_of(outcome, answer)
        is_late = found is None or found.stage is TurnStage.GIVEN
        if found is None or is_late or (found.stage is TurnStage.JUDGED and outcome.score is None):
            self.counts["late_outcomes"] += 1
            return False
        at = {"session": found.session, "turn": turn, "at": now}
        self._do({"kind": "outcome", **at, "outcome": outcome.as_record()})
        if reward is not None:
            self._do({"kind": "judged", **at, "reward": reward, "by": outcome.kind.value})
        elif self.limits.hints_alone and (outcome.text or outcome.corrected):
            self._do({"kind": "judged", **at, "reward": None, "by": HINT})
        return True

    def judge(self, turn: str, reward: float, by: str, now: float) -> bool:
        """Give a turn a judge's reward. False if it needs none any more."""
        found = self.turns.get(turn)
        if found is None or found.stage is not TurnStage.HEARD:
            return False
        self._do({"kind": "judged", "session": found.session, "turn": turn, "at": now} | {"reward": reward, "by": by})
        return True

    def judge_failed(self, turn: str) -> None:
        """Count a failure of the judge; after `judge_tries` the turn is left out."""
        self.counts["judge_failures"] += 1
        if (found := self.turns.get(turn)) is not None and found.stage is TurnStage.HEARD:
            found.failures += 1  # not recorded: a restart tries as often again
            if found.failures >= self.limits.judge_tries:
                self._end(turn, TurnEnd.UNJUDGED)

    def give(self, ticket: int, min_version: int, most: int, now: float) -> list[LiveTurn] | None:
        """The turns of a ticket's group: the same ones as before, or the oldest that have a reward and no token older
        than this version. None if the batch is not due yet."""
        if ticket in self._by_ticket:  # live-22
            return [self.turns[turn] for turn in self._by_ticket[ticket]]
        for turn in [
            one for one in self._of(TurnStage.JUDGED) if self.same_weights.get(one.version, one.version) < min_version
        ]:
            self._end(turn.id, TurnEnd.STALE)
        due = self.due_at(most)
        if due is None or due > now:
            return None
        chosen = sorted(self._of(TurnStage.JUDGED), key=lambda turn: turn.since)[:most]
        for session in {turn.session: None for turn in chosen}:
            of_session = {turn.id: self.baselines.of(turn.key) for turn in chosen if turn.session == session}
            self._do({"kind": "given", "session": session, "at": now, "ticket": ticket, "turns": of_session})
        return chosen

    def due_at(self, most: int) -> float | None:
        """When the next batch is due: at once with `most` turns that have a reward, else `batch_seconds` after the
        first of them had it; None if there is none."""
        since = [turn.since for turn in self._of(TurnStage.JUDGED)]
        if not since:
            return None
        return min(since) if len(since) >= most else min(since) + self.limits.batch_seconds

    def settle(self, ticket: int, end: TurnEnd) -> None:
        """End the turns of a ticket."""
        for turn in list(self._by_ticket.get(ticket, ())):
            self._end(turn, end)

    def close(self, session: str, how: str) -> None:
        """TurnEnd a session. Its turns still wait for their outcomes."""
        found = self.sessions.get(session)
        if found is not None and found.closed is None:
            self._do({"kind": "closed", "session": session, "how": how})

    def forget(self, session: str) -> None:
        """Remove a session and its turns, but for those that are in a group."""
        self.close(session, "forgotten")
        for turn in [
            one.id for one in self.turns.values() if one.session == session and one.stage is not TurnStage.GIVEN
        ]:
            self._end(turn, TurnEnd.FORGOTTEN)

    def tick(self, now: float) -> None:
        """TurnEnd what has waited for too long: idle sessions, and turns whose outcome or judgement never came."""
        for session in [one for one in self.sessions.values() if one.used_at + self.limits.idle_seconds <= now]:
            self.close(session.id, "idle")
        for turn in list(self.turns.values()):
            if turn.since + self.limits.outcome_seconds <= now:
                if turn.stage is TurnStage.OPEN:
                    self._end(turn.id, TurnEnd.NO_OUTCOME)
                elif turn.stage is TurnStage.HEARD:
                    self._end(turn.id, TurnEnd.UNJUDGED)

    # What is there.

    def of_response(self, key: str, response: str) -> list[str]:
        """The turns of this key's response that have not ended."""
        return list(self._by_response.get((key, response), ()))

    def heard(self) -> list[LiveTurn]:
        """The turns that wait for a judge, the oldest outcome first."""
        return sorted(self._of(TurnStage.HEARD), key=lambda turn: turn.since)

    def open_turns(self, session: str) -> list[str]:
        """The turns of a session that have no reward yet."""
        return [one.id for one in self.turns.values() if one.session == session and one.reward is None]

    @property
    def tickets(self) -> list[int]:
        """The tickets whose turns have not ended."""
        return list(self._by_ticket)

    def stages(self) -> dict[str, int]:
        """The number of turns in each stage."""
        return {stage.value: len(turns) for stage, turns in self._stages.items()}

    # Records.

    def apply(self, record: Mapping[str, Any]) -> None:
        """Make the change of a record (live-24)."""
        self._changes = max(self._changes, record["n"] + 1)
        match record["kind"]:
            case "session":
                self.sessions[record["session"]] = LiveSession(
                    id=record["session"],
                    key=record["key"],
                    user=record["user"],
                    name=record["name"],
                    used_at=record["at"],
                )
            case "turn":
                self._apply_turn(record)
            case "outcome":
                turn = self.turns[record["turn"]]
                turn.reactions.append(Reaction.of(record["outcome"]))
                if turn.stage is TurnStage.OPEN:
                    self._move(turn, TurnStage.HEARD, record["at"])
            case "judged":
                turn = self.turns[record["turn"]]
                since = turn.since if turn.stage is TurnStage.JUDGED else record["at"]
                self._move(turn, TurnStage.JUDGED, since)
                turn.reward, turn.by = record["reward"], record["by"]
            case "given":
                for name, baseline in record["turns"].items():
                    turn = self.turns[name]
                    assert turn.stage is TurnStage.JUDGED, f"turn {name} is {turn.stage}"  # live-22, live-23
                    self._move(turn, TurnStage.GIVEN, record["at"])
                    turn.ticket, turn.baseline = record["ticket"], baseline
                    self._by_ticket.setdefault(record["ticket"], []).append(name)
                    if turn.reward is not None:
                        self.baselines.learn(turn.key, turn.reward)
            case "closed":
                session = self.sessions[record["session"]]
                session.closed = record["how"]
                self._held -= session.turns
                self.counts[f"closed_{record['how']}"] += 1
                self._drop_if_over(session)
            case "end":
                self._apply_end(record["turn"], TurnEnd(record["how"]))
            case other:
                raise ValueError(f"kind={other!r}: is no change of a collection")

    def count_end(self, end: Mapping[str, Any]) -> None:
        """Count the end of a turn whose session is over, and its other records gone."""
        self._changes = max(self._changes, end["n"] + 1)
        self.recorded += 1
        self.ended[TurnEnd(end["how"])] += 1
        if end.get("reward") is not None:
            self.baselines.learn(end["key"], end["reward"])

    def _apply_turn(self, record: Mapping[str, Any]) -> None:
        session = self.sessions[record["session"]]
        turn = LiveTurn(
            id=record["turn"],
            session=session.id,
            number=session.turns,
            key=session.key,
            response=record["response"],
            siblings=record["siblings"],
            version=record["version"],
            at=record["at"],
            since=record["at"],
        )
        session.turns += 1
        self._held += session.closed is None
        session.alive += 1
        session.used_at = record["at"]
        self.recorded += 1
        self.turns[turn.id] = self._stages[TurnStage.OPEN][turn.id] = turn
        self._by_response.setdefault((turn.key, turn.response), []).append(turn.id)

    def _apply_end(self, name: str, how: TurnEnd) -> None:
        turn = self.turns.pop(name)  # live-21: a second end is a KeyError
        del self._stages[turn.stage][name]
        _without(self._by_response, (turn.key, turn.response), name)
        if turn.ticket is not None:
            _without(self._by_ticket, turn.ticket, name)
        self.ended[how] += 1
        session = self.sessions[turn.session]
        session.alive -= 1
        self._drop_if_over(session)

    def _drop_if_over(self, session: LiveSession) -> None:
        if session.closed is not None and not session.alive:
            del self.sessions[session.id]
            self.dropped.append(session.id)

    def _do(self, record: Record) -> None:
        record["n"] = self._changes
        self.apply(record)
        self.write(record)
        assert self.recorded == len(self.turns) + self.ended.total()  # live-21

    def _end(self, name: str, how: TurnEnd) -> None:
        turn = self.turns[name]
        self._do(
            {"kind": "end", "session": turn.session, "turn": name, "how": how.value, "key": turn.key}
            | {"user": self.sessions[turn.session].user, "ticket": turn.ticket}
            | ({"reward": turn.reward} if turn.ticket is not None else {})
        )

    def _make_room(self) -> None:
        while len(self.turns) > self.limits.most_turns:
            unjudged = (TurnStage.OPEN, TurnStage.HEARD)
            oldest = next((turn for turn in self.turns.values() if turn.stage in unjudged), None)
            oldest = oldest or next((turn for turn in self.turns.values() if turn.stage is not TurnStage.GIVEN), None)
            if oldest is None:
                return
            self._end(oldest.id, TurnEnd.FULL)

    def _make_room_for_sessions(self, used: str) -> None:
        """End the sessions that were not used for the longest time, until those that go on have few enough turns."""
        while self._held > self.limits.most_turns:
            others = [one for one in self.sessions.values() if one.closed is None and one.id != used]
            if not others:
                return
            self.close(min(others, key=lambda one: one.used_at).id, "room")

    def _reward_of(self, outcome: Reaction, answer: str | None) -> float | None:
        """The reward that an outcome says without a judge. An answer is right if it equals its correction."""
        if outcome.score is not None:
            return outcome.score
        if outcome.corrected is not None and answer is not None:
            return 1.0 if outcome.corrected.strip() == answer.strip() else -1.0
        return self.limits.rewards.get(outcome.kind)

    def _of(self, stage: TurnStage) -> list[LiveTurn]:
        return list(self._stages[stage].values())

    def _move(self, turn: LiveTurn, stage: TurnStage, since: float) -> None:
        del self._stages[turn.stage][turn.id]
        self._stages[stage][turn.id] = turn
        turn.stage, turn.since = stage, since


def _without(index: dict[Any, list[str]], key: Any, name: str) -> None:
    index[key].remove(name)
    if not index[key]:
        del index[key]


def read(limits: CollectionLimits, records: Iterable[Record], write: Callable[[Record], None]) -> Collection:
    """The collection of these records, in any order: those of sessions that are not over, and all ends so far."""
    made = Collection(limits)
    for record in sorted(records, key=lambda record: record["n"]):
        if record["kind"] == "end" and record["turn"] not in made.turns:
            made.count_end(record)
        else:
            made.apply(record)
    made.write = write
    return made

"""The collection under any order of turns, outcomes, judgements, batches, ends and restarts."""

import json
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from goaly.live.collection import Collection, CollectionLimits, Record, read
from goaly.live.turn import Reaction, ReactionKind, TurnEnd, TurnStage

LIMITS = CollectionLimits(
    most_turns=12,
    idle_seconds=40,
    session_turns=4,
    outcome_seconds=60,
    batch_seconds=10,
    judge_tries=2,
    rewards={ReactionKind.MALFORMED: -1.0},
)


class Log:
    """Keeps records as the files of a run do: those of a session until it is over, and all ends."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[str]] = {}
        self.ends: list[str] = []

    def write(self, record: Record) -> None:
        line = json.dumps(record)
        if record["kind"] == "end":
            self.ends.append(line)
        else:
            self.sessions.setdefault(record["session"], []).append(line)

    def records(self) -> list[Record]:
        return [json.loads(line) for lines in (*self.sessions.values(), self.ends) for line in lines]


def begun(**changes: object) -> tuple[Collection, Log]:
    log = Log()
    limits = CollectionLimits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__slots__}, **changes})
    collection = Collection(limits, log.write)
    collection.begin("a", "key", 0.0)
    return collection, log


def added(collection: Collection, now: float = 0.0, session: str = "a", version: int = 0, **facts: object) -> str:
    made: dict[str, object] = {"response": f"r{collection.recorded}", "siblings": "", "version": version, **facts}
    return collection.add(session, {}, now, **made)  # type: ignore[arg-type]


def state(collection: Collection) -> object:
    sessions = {
        one.id: (one.key, one.user, one.used_at, one.turns, one.alive, one.closed)
        for one in collection.sessions.values()
    }
    turns = {
        one.id: (one.stage, one.since, one.reward, one.by, one.ticket, one.baseline, one.reactions, one.response)
        for one in collection.turns.values()
    }
    return sessions, turns, collection.recorded, +collection.ended, sorted(collection.tickets)


class AnyTraffic(RuleBasedStateMachine):
    """live-21, live-22, live-23, live-24"""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.collection = Collection(LIMITS, self.log.write)
        self.now = 0.0
        self.begun = 0
        self.all: list[str] = []
        self.judged: dict[str, float] = {}
        self.groups: dict[int, list[str]] = {}
        self.settled: set[int] = set()

    def pick(self, number: int) -> str:
        return self.all[number % len(self.all)]

    @rule(seconds=st.floats(0, 30))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.collection.tick(self.now)

    @rule(key=st.sampled_from(["one", "two"]))
    def a_session_begins(self, key: str) -> None:
        self.collection.begin(f"s{self.begun}", key, self.now)
        self.begun += 1

    @rule(number=st.integers(0), version=st.integers(0, 5), malformed=st.integers(0, 1))
    def a_turn_is_served(self, number: int, version: int, malformed: int) -> None:
        going_on = [one.id for one in self.collection.sessions.values() if one.closed is None]
        if going_on:
            session = going_on[number % len(going_on)]
            turn = added(self.collection, self.now, session, version, malformed=malformed)
            self.all.append(turn)
            if malformed:
                self.judged[turn] = -1.0

    @precondition(lambda self: self.all)
    @rule(number=st.integers(0), kind=st.sampled_from([ReactionKind.REPLY, ReactionKind.RETRY, ReactionKind.EDIT]))
    def something_is_said(self, number: int, kind: ReactionKind) -> None:
        self.collection.hear(self.pick(number), Reaction(kind=kind, text="no"), self.now)

    @precondition(lambda self: self.all)
    @rule(number=st.integers(0), score=st.sampled_from([-1.0, 0.0, 1.0]))
    def a_score_is_sent(self, number: int, score: float) -> None:
        if self.collection.hear(self.pick(number), Reaction(kind=ReactionKind.FEEDBACK, score=score), self.now):
            self.judged[self.pick(number)] = score

    @precondition(lambda self: self.all)
    @rule(number=st.integers(0), reward=st.sampled_from([-1.0, 0.0, 1.0]))
    def a_judge_answers(self, number: int, reward: float) -> None:
        if self.collection.judge(self.pick(number), reward, "judge", self.now):
            self.judged[self.pick(number)] = reward

    @precondition(lambda self: self.all)
    @rule(number=st.integers(0))
    def a_judge_fails(self, number: int) -> None:
        self.collection.judge_failed(self.pick(number))

    @rule(min_version=st.integers(0, 4))
    def a_ticket_asks(self, min_version: int) -> None:
        ticket = len(self.groups)
        given = self.collection.give(ticket, min_version, 3, self.now)
        if given is not None:
            assert 0 < len(given) <= 3
            assert all(turn.version >= min_version for turn in given)
            assert all(turn.reward == self.judged[turn.id] for turn in given)  # live-23
            names = [turn.id for turn in given]
            assert not {*names} & {name for others in self.groups.values() for name in others}  # live-22
            self.groups[ticket] = names

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0))
    def a_ticket_asks_again(self, number: int) -> None:
        ticket = number % len(self.groups)
        if ticket not in self.settled:
            given = self.collection.give(ticket, 9, 3, self.now)
            assert given is not None
            assert [turn.id for turn in given] == self.groups[ticket]  # live-22

    @precondition(lambda self: self.groups)
    @rule(number=st.integers(0), end=st.sampled_from([TurnEnd.TRAINED, TurnEnd.REFUSED]))
    def a_ticket_ends(self, number: int, end: TurnEnd) -> None:
        self.collection.settle(number % len(self.groups), end)
        self.settled.add(number % len(self.groups))

    @precondition(lambda self: self.begun)
    @rule(number=st.integers(0), forgotten=st.booleans())
    def a_session_ends(self, number: int, forgotten: bool) -> None:
        session = f"s{number % self.begun}"
        if forgotten and session in self.collection.sessions:
            self.collection.forget(session)
        else:
            self.collection.close(session, "end")

    @rule()
    def files_of_sessions_that_are_over_go(self) -> None:
        while self.collection.dropped:
            self.log.sessions.pop(self.collection.dropped.pop(), None)

    @rule()
    def the_process_dies(self) -> None:
        before = state(self.collection)
        self.collection = read(LIMITS, self.log.records(), self.log.write)
        assert state(self.collection) == before  # live-24

    @invariant()
    def every_turn_has_one_end_or_none(self) -> None:
        ends = [json.loads(line)["turn"] for line in self.log.ends]
        assert len(ends) == len({*ends})
        assert {*ends} | self.collection.turns.keys() == {*self.all}
        assert not {*ends} & self.collection.turns.keys()
        assert self.collection.recorded == len(self.all)  # live-21

    @invariant()
    def memory_is_bounded(self) -> None:
        given = self.collection.stages()[TurnStage.GIVEN]
        assert len(self.collection.turns) <= LIMITS.most_turns + given
        going_on = [one.turns for one in self.collection.sessions.values() if one.closed is None]
        assert sum(going_on) <= LIMITS.most_turns


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_turn_whose_outcome_never_comes_is_left_out_and_not_zero():
    collection, _ = begun()  # live-23
    turn = added(collection)
    collection.tick(59.0)
    assert collection.turns[turn].reward is None
    collection.tick(60.0)
    assert collection.ended == {TurnEnd.NO_OUTCOME: 1}
    assert collection.give(0, 0, 1, 100.0) is None


def test_a_judge_that_fails_again_and_again_leaves_the_turn_out():
    collection, _ = begun()
    turn = added(collection)
    collection.hear(turn, Reaction(kind=ReactionKind.REPLY, text="no"), 1.0)
    collection.judge_failed(turn)
    assert collection.stages()["heard"] == 1
    collection.judge_failed(turn)
    assert collection.ended == {TurnEnd.UNJUDGED: 1}


def test_a_score_replaces_a_judgement_until_the_turn_is_in_a_group():
    collection, _ = begun()
    turn = added(collection)
    collection.hear(turn, Reaction(kind=ReactionKind.REPLY, text="thanks"), 1.0)
    collection.judge(turn, 1.0, "judge", 2.0)
    assert collection.hear(turn, Reaction(kind=ReactionKind.FEEDBACK, score=-1.0), 3.0)
    given = collection.give(0, 0, 1, 3.0)
    assert given is not None
    assert given[0].reward == -1.0
    assert not collection.hear(turn, Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 4.0)
    assert collection.counts["late_outcomes"] == 1


@pytest.mark.parametrize(("answer", "reward"), [("12", 1.0), ("13", -1.0)])
def test_a_corrected_answer_judges_by_itself(answer: str, reward: float):
    collection, _ = begun()
    turn = added(collection)
    collection.hear(turn, Reaction(kind=ReactionKind.FEEDBACK, corrected="12 "), 1.0, answer=answer)
    assert collection.turns[turn].reward == reward


def test_a_malformed_call_is_an_action_with_its_reward():
    collection, _ = begun()
    assert collection.turns[added(collection, malformed=1)].reward == -1.0


def test_a_batch_forms_when_there_are_enough_or_after_a_time():
    collection, _ = begun(session_turns=99)
    first, second = added(collection), added(collection)
    collection.hear(first, Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 5.0)
    assert collection.due_at(2) == 15.0
    assert collection.give(0, 0, 2, 14.0) is None
    collection.hear(second, Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 6.0)
    given = collection.give(0, 0, 2, 6.0)
    assert given is not None
    assert [turn.id for turn in given] == [first, second]


def test_the_oldest_turn_without_a_reward_goes_first_when_the_collection_is_full():
    collection, _ = begun(most_turns=2, session_turns=99)
    first = added(collection)
    collection.hear(first, Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 0.0)
    second = added(collection)
    added(collection)
    assert collection.ended == {TurnEnd.FULL: 1}
    assert first in collection.turns
    assert second not in collection.turns


def test_a_session_ends_by_its_size_and_its_turns_still_wait_for_their_outcomes():
    collection, _ = begun()
    turns = [added(collection) for _ in range(4)]
    assert collection.sessions["a"].closed == "size"
    assert collection.hear(turns[0], Reaction(kind=ReactionKind.FEEDBACK, score=1.0), 50.0)


def test_responses_of_other_keys_are_not_found():
    collection, _ = begun()
    turn = added(collection, response="r")
    assert collection.of_response("key", "r") == [turn]
    assert collection.of_response("other", "r") == []


def test_any_cut_of_the_log_reads_as_a_collection_in_which_no_turn_is_in_two_groups():
    """A process that dies between two records: what was written reads, and trains no turn twice (live-22)."""
    written: list[Record] = []
    collection = Collection(LIMITS, lambda record: written.append(json.loads(json.dumps(record))))
    draw = Random(3)
    for step in range(60):
        session = f"s{step // 3}"
        if step % 3 == 0:
            collection.begin(session, "key", step)
        turn = added(collection, step, session)
        if draw.random() < 0.7:
            collection.hear(turn, Reaction(kind=ReactionKind.FEEDBACK, score=draw.choice([-1.0, 1.0])), step)
        if step % 5 == 4:
            collection.give(step // 5, 0, 4, step)
        if step % 7 == 6:
            collection.settle(draw.randrange(8), TurnEnd.TRAINED)
    for cut in range(len(written)):
        found = read(LIMITS, written[:cut], lambda record: None)
        given = [name for ticket in found.tickets for turn in found.give(ticket, 0, 4, 0.0) or () for name in [turn.id]]
        assert len(given) == len({*given})
        assert found.recorded == len(found.turns) + found.ended.total()


def test_ten_thousand_conversations_with_delays_retries_edits_and_disconnects_train_each_judged_turn_once():
    """live-21, live-22: what is judged is trained once, or counted with its reason; memory stays bounded."""
    draw, log = Random(7), Log()
    limits = CollectionLimits(most_turns=500, idle_seconds=300, outcome_seconds=600, batch_seconds=20)
    collection = Collection(limits, log.write)
    due: list[tuple[float, str, Reaction]] = []
    now, trained, ticket, most = 0.0, [], 0, 0
    for number in range(10_000):
        now += draw.expovariate(1.0)
        session = f"c{number}"
        collection.begin(session, f"key{number % 3}", now)
        for _ in range(draw.choice([1, 1, 2, 3])):
            turn = added(collection, now, session, version=ticket // 2, malformed=int(draw.random() < 0.02))
            kind = draw.choice([ReactionKind.REPLY, ReactionKind.RETRY, ReactionKind.EDIT, ReactionKind.FEEDBACK])
            if draw.random() < 0.85:  # else the client has gone
                outcome = Reaction(kind=kind, score=draw.choice([-1.0, 1.0]) if kind is ReactionKind.FEEDBACK else None)
                due += [(now + draw.expovariate(1 / 60), turn, outcome)] * draw.choice([1, 1, 2])
        draw.shuffle(due)  # feedback comes out of order
        for at, turn, outcome in [one for one in due if one[0] <= now]:
            collection.hear(turn, outcome, at)
        due = [one for one in due if one[0] > now]
        if number % 8:
            continue
        for heard in collection.heard()[: draw.randrange(32)]:
            if draw.random() < 0.1:
                collection.judge_failed(heard.id)
            else:
                collection.judge(heard.id, draw.choice([-1.0, 0.0, 1.0]), "judge", now)
        if (given := collection.give(ticket, max(0, ticket // 2 - 8), 16, now)) is not None:
            trained += [one.id for one in given]
            collection.settle(ticket, TurnEnd.TRAINED)
            ticket += 1
        collection.tick(now)
        most = max(most, len(collection.turns))
        if number % 2400 == 2392:
            collection = read(limits, log.records(), log.write)
        for over in collection.dropped:
            log.sessions.pop(over, None)
        collection.dropped.clear()
    collection.tick(now + 10_000)
    assert len(trained) == len({*trained}) == collection.ended[TurnEnd.TRAINED]
    assert collection.recorded == collection.ended.total() + len(collection.turns)
    assert {*collection.stages().values()} <= {0, collection.stages()["judged"]}
    assert most <= limits.most_turns
    assert len(trained) > 3000


def test_a_text_alone_is_enough_where_a_teacher_sees_it_and_no_reward_is_made_up():
    """live-23"""
    collection, log = begun(hints_alone=True)
    silent, told = added(collection), added(collection)
    collection.hear(told, Reaction(kind=ReactionKind.REPLY, text="no, 12"), 1.0)
    assert (collection.turns[told].reward, collection.turns[told].by) == (None, "hint")
    assert collection.stages()["judged"] == 1
    given = collection.give(0, 0, 1, 1.0)
    assert given is not None
    assert [turn.id for turn in given] == [told]
    collection.settle(0, TurnEnd.TRAINED)
    assert collection.baselines.of("key") == 0.0
    assert silent in collection.turns
    assert state(read(collection.limits, log.records(), log.write)) == state(collection)

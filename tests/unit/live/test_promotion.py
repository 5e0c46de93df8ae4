"""The gate's state machine over random courses, restarted at any record: live-2 and live-3."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from goaly.base.errors import CorruptLog
from goaly.live.decision import Decision, OnRegression
from goaly.live.gate_records import (
    Baseline,
    Chosen,
    ComparedPair,
    Decided,
    GateLog,
    GateRecord,
    JudgedAnswer,
    Opened,
    RolledBack,
    gate_records,
)
from goaly.live.gate_settings import GateSettings
from goaly.live.promotion import Promotion
from goaly.live.trial import CANARY, SHADOW, START, Trial

QUICK = GateSettings(margin=0.4, error_rate=0.3, pairs=60, mix_bound=0.5)
"""A gate that decides after few pairs."""
RIGHT = JudgedAnswer(score=1.0, action="answer", length=0.1)
WRONG = JudgedAnswer(score=0.0, action="answer", length=0.1)
ASKS = JudgedAnswer(score=1.0, action="question", length=0.1)
BASELINE = Baseline(version=0, answers={"one": (RIGHT, WRONG), "two": (RIGHT, RIGHT)})


def pair(candidate: int, number: int, answers: tuple[JudgedAnswer, JudgedAnswer] | None, **facts: Any) -> ComparedPair:
    return ComparedPair(
        candidate=candidate, number=number, answers=answers, **{"comparison": CANARY, "prompt": "one"} | facts
    )


def opened(
    records: list[GateRecord], settings: GateSettings = QUICK, on_regression: OnRegression = OnRegression.ROLL_BACK
) -> Promotion:
    gate = Promotion(settings, records.append, on_regression=on_regression)
    gate.open(0)
    gate.set_baseline(BASELINE)
    return gate


def ask(gate: Promotion, *answers: JudgedAnswer) -> Decided:
    """Give the candidate these answers, and the served version right ones, until the trial ends."""
    assert gate.trial is not None
    candidate, decided, number = gate.trial.candidate, None, 0
    while decided is None:
        decided = gate.compared(pair(candidate, number, (answers[number % len(answers)], RIGHT)))
        number += 1
    return decided


def test_a_candidate_that_is_as_good_is_promoted():
    records: list[GateRecord] = []
    gate = opened(records)
    gate.published(3)
    decided = ask(gate, RIGHT)
    assert (decided.decision, decided.candidate, decided.served, decided.then) == (Decision.PROMOTED, 3, 0, None)
    assert decided.evidence["canary"]["verdict"] == "not_worse"
    assert (gate.served, gate.trial, gate.last) == (3, None, decided)


@pytest.mark.parametrize("on_regression", OnRegression)
def test_a_worse_candidate_is_refused_and_followed_by_what_the_setting_says(on_regression: OnRegression):
    gate = opened([], on_regression=on_regression)
    gate.published(1)
    gate.published(2)
    decided = ask(gate, WRONG)
    assert (decided.decision, decided.then, gate.served) == (Decision.REFUSED, on_regression, 0)
    assert decided.why.startswith("worse by more than 0.4: ")
    assert gate.rolls_back == (on_regression is OnRegression.ROLL_BACK)
    assert gate.stopped == (on_regression is OnRegression.STOP)
    goes_on = on_regression is OnRegression.HOLD
    assert (gate.trial.candidate if gate.trial else None) == (2 if goes_on else None)


def test_a_version_from_before_the_roll_back_ended_is_never_the_candidate():
    gate = opened([])
    gate.published(1)
    ask(gate, WRONG)
    gate.published(4)
    assert gate.trial is None
    gate.rolled_back(newest=5)
    gate.published(5)
    assert gate.trial is None
    gate.published(6)
    assert gate.trial is not None
    assert (gate.trial.candidate, gate.trial.served) == (6, 0)


def test_a_shifted_mix_holds_a_candidate_that_scores_as_well():
    gate = opened([], GateSettings(margin=0.1, error_rate=0.05, mix_bound=0.2))
    gate.published(1)
    decided = ask(gate, ASKS)
    assert (decided.decision, decided.then, gate.served) == (Decision.HELD, None, 0)
    assert "more question" in decided.why


def test_small_losses_do_not_add_up_over_promotions():
    # As good as the served version, but far worse than the first one was.
    records: list[GateRecord] = []
    gate = Promotion(QUICK, records.append, on_regression=OnRegression.HOLD)
    gate.open(0)
    gate.set_baseline(Baseline(version=0, answers={"one": (RIGHT,)}))
    gate.published(1)
    decided, number = None, 0
    while decided is None:
        decided = gate.compared(pair(1, number, (WRONG, WRONG)))
        number += 1
    assert decided.decision is Decision.REFUSED
    assert decided.why == f"worse by more than 0.4: {START}"


def test_pairs_without_a_judge_count_as_asked_and_end_a_trial():
    gate = opened([])
    gate.published(1)
    found = [gate.compared(pair(1, number, None)) for number in range(QUICK.pairs)]
    assert found[:-1] == [None] * (QUICK.pairs - 1)
    assert found[-1] is not None
    assert found[-1].decision is Decision.UNDECIDED
    assert gate.served == 0


def test_a_quick_pair_waits_for_those_before_it():
    trial = Trial(1, 0, QUICK, BASELINE.answers)
    for number in range(1, 40):
        trial.add(pair(1, number, (RIGHT, RIGHT)))
    assert trial.decision is None
    trial.add(pair(1, 0, (RIGHT, RIGHT)))
    assert trial.decision is not None
    assert trial.decision[0] is Decision.PROMOTED


def test_next_pairs_are_those_not_asked_yet_up_to_the_budget():
    trial = Trial(1, 0, GateSettings(pairs=4, shadow_pairs=1), BASELINE.answers)
    trial.add(pair(1, 1, (RIGHT, RIGHT)))
    assert trial.wanted(CANARY) == 0
    assert trial.wanted(CANARY, frozenset({0})) == 2
    assert trial.wanted(CANARY, frozenset({0, 2, 3})) is None
    assert trial.wanted(SHADOW) == 0


def test_users_prompts_must_not_go_worse_either():
    gate = opened([], GateSettings(margin=0.4, error_rate=0.3, mix_bound=0.5, shadow_pairs=50))
    gate.published(1)
    assert gate.trial is not None
    for number in range(40):
        assert gate.compared(pair(1, number, (RIGHT, RIGHT))) is None
    assert gate.trial.wanted(CANARY) is None
    decided, number = None, 0
    while decided is None:
        decided = gate.compared(pair(1, number, (WRONG, RIGHT), comparison=SHADOW, prompt="a user's"))
        number += 1
    assert (decided.decision, decided.why) == (Decision.REFUSED, "worse by more than 0.4: shadow")


def test_a_restart_with_another_setting_lets_training_go_on():
    records: list[GateRecord] = []
    gate = opened(records, on_regression=OnRegression.STOP)
    gate.published(1)
    ask(gate, WRONG)
    again = Promotion(QUICK, records.append, on_regression=OnRegression.STOP, earlier=list(records))
    assert again.stopped
    again = Promotion(QUICK, records.append, on_regression=OnRegression.HOLD, earlier=list(records))
    assert not again.stopped


def test_nothing_is_done_that_could_not_be_recorded():
    # live-3
    def full(record: GateRecord) -> None:
        raise OSError("no space left on device")

    gate = Promotion(QUICK, full)
    with pytest.raises(OSError, match="no space"):
        gate.open(0)
    assert not gate.is_open


def test_a_restarted_gate_decides_what_its_pairs_had_shown():
    records: list[GateRecord] = []
    gate = opened(records)
    gate.published(1)
    ask(gate, RIGHT)
    before = records[: next(n for n, one in enumerate(records) if isinstance(one, Decided))]
    written: list[GateRecord] = []
    again = Promotion(QUICK, written.append, earlier=before)
    assert written == [gate.last]
    assert again.served == 1


class Course(RuleBasedStateMachine):
    """Versions are published, pairs arrive in any order, the gate restarts, the trainer goes back at any time."""

    @initialize(on_regression=st.sampled_from(OnRegression))
    def start(self, on_regression: OnRegression) -> None:
        self.records: list[GateRecord] = []
        self.on_regression = on_regression
        self.gate = opened(self.records, on_regression=on_regression)
        self.newest = 0
        self.tainted = 0
        """Versions up to it were trained before the last roll back ended."""

    @rule(versions=st.integers(1, 3))
    def publish(self, versions: int) -> None:
        for _ in range(versions):
            self.newest += 1
            self.gate.published(self.newest)

    @precondition(lambda self: self.gate.trial is not None)
    @rule(
        answers=st.lists(
            st.sampled_from([(RIGHT, RIGHT), (RIGHT, WRONG), (WRONG, RIGHT), (ASKS, RIGHT), None]), min_size=1
        ),
        times=st.integers(1, 12),
        data=st.data(),
    )
    def pairs(self, answers: list[tuple[JudgedAnswer, JudgedAnswer] | None], times: int, data: st.DataObject) -> None:
        trial = self.gate.trial
        assert trial is not None
        numbers: list[int] = []
        while len(numbers) < len(answers) * times:
            number = trial.wanted(CANARY, frozenset(numbers))
            if number is None:
                break
            numbers.append(number)
        for number in data.draw(st.permutations(numbers)):
            self.gate.compared(pair(trial.candidate, number, answers[number % len(answers)], prompt="two"))

    @rule()
    def restart(self) -> None:
        before = len(self.records)
        again = Promotion(QUICK, self.records.append, on_regression=self.on_regression, earlier=list(self.records))
        assert len(self.records) == before
        assert (again.served, again.last) == (self.gate.served, self.gate.last)
        assert (again.rolls_back, again.stopped) == (self.gate.rolls_back, self.gate.stopped)
        assert str(again.trial) == str(self.gate.trial)
        self.gate = again
        again.published(self.newest)

    @precondition(lambda self: self.gate.rolls_back)
    @rule()
    def roll_back(self) -> None:
        self.tainted = self.newest
        self.gate.rolled_back(self.newest)

    @precondition(lambda self: self.gate.trial is not None)
    @rule()
    def lose_the_candidate(self) -> None:
        self.gate.withdraw("its weights are lost")

    @invariant()
    def served_versions_were_promoted(self) -> None:
        served, candidates = 0, [0]
        for number, record in enumerate(self.records):
            match record:
                case Chosen():
                    assert record.served == served
                    assert record.candidate > max(candidates)
                    assert not isinstance(self.records[number - 1], Chosen)
                    candidates.append(record.candidate)
                case Decided():
                    assert (record.candidate, record.served) == (candidates[-1], served)
                    if record.decision is Decision.PROMOTED:  # live-2
                        assert {found["verdict"] for found in record.evidence.values()} == {"not_worse"}
                        served = record.candidate
                case _:
                    assert isinstance(record, Opened | Baseline | ComparedPair | RolledBack)
        assert self.gate.served == served

    @invariant()
    def a_version_that_can_be_the_candidate_is(self) -> None:
        free = not self.gate.rolls_back and not self.gate.stopped
        if free and self.gate.trial is None:
            chosen = [one.candidate for one in self.records if isinstance(one, Chosen)]
            assert self.newest <= max([0, self.tainted, *chosen])
        if not free:
            assert self.gate.trial is None

    @invariant()
    def no_candidate_is_from_before_a_roll_back(self) -> None:
        assert self.gate.trial is None or self.gate.trial.candidate > self.tainted


Course.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=25)
test_the_gate_keeps_its_rules_on_any_course = Course.TestCase


def test_records_come_back_as_they_were_written(tmp_path: Path):
    file, records = tmp_path / "gate.jsonl", []
    gate = opened(records)
    gate.published(1)
    ask(gate, WRONG)
    gate.rolled_back(3)
    gate.published(4)
    gate.compared(pair(4, 0, None))
    log = GateLog(file)
    for record in records:
        log.write(record)
    log.close()
    assert list(gate_records(file)) == records
    file.write_bytes(file.read_bytes()[:-5])  # torn by a crash
    assert list(gate_records(file)) == records[:-1]
    log = GateLog(file)
    log.write(records[-1])
    log.close()
    assert list(gate_records(file)) == records


def test_a_damaged_record_is_named(tmp_path: Path):
    file = tmp_path / "gate.jsonl"
    file.write_text('{"kind":"Opened","version":0}\n{"kind":"Closed"}\n')
    with pytest.raises(CorruptLog, match=r"gate\.jsonl, line 2: is no record of a gate"):
        list(gate_records(file))
    assert list(gate_records(tmp_path / "none")) == []

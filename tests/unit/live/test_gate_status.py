"""The lines about the gate in a live run's status."""

from pathlib import Path

from goaly.live.decision import Decision, OnRegression
from goaly.live.gate_records import (
    GATE_FILE,
    Baseline,
    Chosen,
    ComparedPair,
    Decided,
    GateLog,
    JudgedAnswer,
    Opened,
    RolledBack,
)
from goaly.live.gate_status import gate_text

NUMBERS = {"verdict": "worse", "mean": -0.5, "pairs": 12, "lower": -0.8, "upper": -0.11}


def decided(candidate: int, decision: Decision, then: OnRegression | None = None) -> Decided:
    evidence = {"canary": NUMBERS, "mix: more question": NUMBERS}
    return Decided(candidate=candidate, served=0, decision=decision, why="because", then=then, evidence=evidence)


def test_the_status_says_what_is_served_and_why_the_last_candidate_was_not(tmp_path: Path):
    log = GateLog(tmp_path / GATE_FILE)

    def now() -> str:
        text = gate_text(tmp_path)
        assert text is not None
        return text.splitlines()[0]

    assert gate_text(tmp_path) is None
    log.write(Opened(version=0))
    assert now() == "gate     serves version 0; asks the first version the canary problems"
    log.write(Baseline(version=0, answers={}))
    assert now() == "gate     serves version 0; waits for a new version"
    log.write(Chosen(candidate=3, served=0))
    answer = JudgedAnswer(score=1.0, action="answer", length=0.1)
    log.write(ComparedPair(candidate=3, comparison="canary", number=0, prompt="p", answers=(answer, answer)))
    assert now() == "gate     serves version 0; version 3 is on trial, with 1 pairs"
    log.write(decided(3, Decision.REFUSED, OnRegression.ROLL_BACK))
    assert gate_text(tmp_path) == (
        "gate     serves version 0; the trainer goes back to version 0\n"
        "last     version 3 was refused (against 0): because\n"
        "         canary: worse; mean difference -0.500 over 12 pairs, between -0.800 and -0.110"
    )
    log.write(RolledBack(served=0, newest=4))
    assert now() == "gate     serves version 0; waits for a new version"
    log.write(decided(5, Decision.PROMOTED))
    assert now() == "gate     serves version 5; waits for a new version"
    log.write(decided(6, Decision.REFUSED, OnRegression.STOP))
    assert now() == "gate     serves version 5; training has stopped"
    log.close()

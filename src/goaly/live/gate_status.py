"""The state of a gate as text, read from its records: what is served, what is on trial, how the last trial ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from goaly.live.decision import Decision, OnRegression
from goaly.live.gate_records import (
    GATE_FILE,
    Baseline,
    Chosen,
    ComparedPair,
    Decided,
    Opened,
    RolledBack,
    gate_records,
)

SCORES = ("canary", "start", "shadow")
"""The tests of scores, in the order in which they are shown."""


def gate_text(run: Path) -> str | None:
    """Lines about the gate of the run in this folder; None if it has none."""
    served: int | None = None
    candidate: int | None = None
    last: Decided | None = None
    pairs, has_baseline, goes_back = 0, False, False
    for record in gate_records(run / GATE_FILE):
        match record:
            case Opened():
                served = record.version
            case Baseline():
                has_baseline = True
            case Chosen():
                candidate, pairs = record.candidate, 0
            case ComparedPair():
                pairs += 1
            case Decided():
                candidate, last = None, record
                served = record.candidate if record.decision is Decision.PROMOTED else served
                goes_back = record.then is OnRegression.ROLL_BACK
            case RolledBack():
                goes_back = False
    if served is None:
        return None
    if not has_baseline:
        now = "asks the first version the canary problems"
    elif candidate is not None:
        now = f"version {candidate} is on trial, with {pairs} pairs"
    elif goes_back:
        now = f"the trainer goes back to version {served}"
    elif last is not None and last.then is OnRegression.STOP:
        now = "training has stopped"
    else:
        now = "waits for a new version"
    lines = [f"gate     serves version {served}; {now}"]
    if last is not None:
        lines.append(f"last     version {last.candidate} was {last.decision} (against {last.served}): {last.why}")
        lines += [f"         {name}: {_numbers(last.evidence[name])}" for name in SCORES if name in last.evidence]
    return "\n".join(lines)


def _numbers(found: Mapping[str, Any]) -> str:
    mean = "no pairs" if found["mean"] is None else f"mean difference {found['mean']:+.3f} over {found['pairs']} pairs"
    return f"{found['verdict']}; {mean}, between {found['lower']:+.3f} and {found['upper']:+.3f}"

"""The actions of answers, and the test of their mix against a baseline.

A policy that is rewarded for what is easy to reward may learn to ask instead of to act, to refuse, or to emit broken
tool calls. Its score on canaries need not show that. So the share of each kind of action, and the mean length, must be
shown to differ from the baseline's by less than a bound, in both directions, by the same sequential test as scores.

A malformed call is an action of its own: it counts here, and is trained with its reward.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from goaly.live.paired_test import Evidence, PairedTest, Verdict

LENGTH = "length"
REFUSALS = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|afraid|unable|not able)|i (?:can ?not|can't|won't|will not)\b)", re.IGNORECASE
)
OPENING_CHARACTERS = 200
"""A refusal is looked for in so many characters: later ones may quote."""


class ActionKind(StrEnum):
    """The kind of action that an answer takes."""

    MALFORMED_CALL = "malformed_call"
    """It has a tool call that cannot be read."""
    TOOL_CALL = "tool_call"
    """It calls a tool."""
    REFUSAL = "refusal"
    """It opens with a refusal."""
    QUESTION = "question"
    """It ends with a question to the user."""
    ANSWER = "answer"
    """Anything else."""


def action_of(text: str, *, calls: int = 0, malformed: int = 0) -> ActionKind:
    """The kind of an answer with this text and these numbers of tool calls."""
    if malformed:
        return ActionKind.MALFORMED_CALL
    if calls:
        return ActionKind.TOOL_CALL
    if REFUSALS.search(text[:OPENING_CHARACTERS].replace("\u2019", "'")):
        return ActionKind.REFUSAL
    return ActionKind.QUESTION if text.rstrip().endswith("?") else ActionKind.ANSWER


class ActionMix:
    """The test of one candidate's mix of actions. Promotion needs every share within the bound of the baseline's; one
    that is beyond it holds the candidate."""

    def __init__(self, *, bound: float, error_rate: float):
        names = [*ActionKind, LENGTH]
        alarm = error_rate / (2 * len(names))  # all tests together raise a false alarm at the error rate
        self._tests = {
            f"{direction} {name}": PairedTest(margin=bound, error_rate=error_rate, worse_error_rate=alarm)
            for name in names
            for direction in ("less", "more")
        }

    def add(self, action: str, length: float, baseline: Sequence[tuple[str, float]]) -> None:
        """Take in an answer's action and length, and those of the baseline's answers to the same prompt."""
        shares = {kind: sum(one == kind for one, _ in baseline) / len(baseline) for kind in map(str, ActionKind)}
        expected = shares | {LENGTH: min(1.0, sum(one for _, one in baseline) / len(baseline))}
        for name, other in expected.items():
            found = min(1.0, length) if name == LENGTH else float(name == action)
            self._tests[f"less {name}"].add(found, other)
            self._tests[f"more {name}"].add(other, found)

    @property
    def is_within(self) -> bool:
        """Whether every share is shown to be within the bound."""
        return all(test.verdict is Verdict.NOT_WORSE for test in self._tests.values())

    @property
    def shifts(self) -> list[str]:
        """The shares that are shown to be beyond the bound, as `more question`."""
        return [name for name, test in self._tests.items() if test.verdict is Verdict.WORSE]

    def evidence(self) -> Mapping[str, Evidence]:
        """The numbers of each test: for `less question` positive differences are more questions than the baseline's,
        for `more question` fewer."""
        return {name: test.evidence() for name, test in self._tests.items()}

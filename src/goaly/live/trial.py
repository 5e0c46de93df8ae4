"""The trial of one candidate: its tests against the served version and against the first one.

    canary   the candidate's score minus that of the served version, for the same problem and seed
    start    the candidate's score minus the mean of the first served version's recorded scores of that problem
    shadow   as canary, for recorded prompts of users
    mix      the shares of actions in canary answers against those of the first served version (`action_mix.py`)

`start` keeps many promotions, each within the margin, from adding up to a loss. Pairs count in the order of their
numbers: one that ended early waits for those before it, so quick answers do not count more than slow ones.
"""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from goaly.live.action_mix import ActionMix
from goaly.live.decision import Decision
from goaly.live.gate_records import ComparedPair, JudgedAnswer
from goaly.live.gate_settings import GateSettings
from goaly.live.paired_test import PairedTest, Verdict

CANARY, START, SHADOW = "canary", "start", "shadow"


class Trial:
    """A candidate's pairs so far, and what they show."""

    def __init__(
        self, candidate: int, served: int, settings: GateSettings, baseline: Mapping[str, tuple[JudgedAnswer, ...]]
    ):
        """`baseline` has the first served version's answers to each canary problem."""
        self.candidate = candidate
        self.served = served
        self._settings = settings
        self._baseline = baseline
        names = [CANARY, START, *([SHADOW] if settings.shadow_pairs else [])]
        self._tests = {name: PairedTest(margin=settings.margin, error_rate=settings.error_rate) for name in names}
        self._mix = ActionMix(bound=settings.mix_bound, error_rate=settings.error_rate)
        self._early: dict[tuple[str, int], ComparedPair] = {}
        """Pairs that wait for one before them."""
        self._counted = {CANARY: 0, SHADOW: 0}
        self.decision: tuple[Decision, str] | None = None
        """The end of the trial, and why; None while it goes on."""

    def add(self, pair: ComparedPair) -> None:
        """Take in a pair. A number that was recorded before, or comes after the end, changes nothing."""
        if pair.number >= self._counted[pair.comparison]:
            self._early.setdefault((pair.comparison, pair.number), pair)
        while (place := (pair.comparison, self._counted[pair.comparison])) in self._early and self.decision is None:
            self._counted[pair.comparison] += 1
            self._count(self._early.pop(place))
            self.decision = self._judged()

    @property
    def problems(self) -> frozenset[str]:
        """The ids of the canary problems that can be asked: those whose first answers are known."""
        return frozenset(self._baseline)

    def wanted(self, comparison: str, under_way: frozenset[int] = frozenset()) -> int | None:
        """The number of the next pair to ask beside those under way; None if no more are needed."""
        if self.decision is not None or (comparison in self._tests and self._is_shown(comparison)):
            return None
        number, most = self._counted[comparison], self._most(comparison)
        while number in under_way or (comparison, number) in self._early:
            number += 1
        return number if number < most else None

    def evidence(self) -> dict[str, dict[str, Any]]:
        """The numbers of each test."""
        scores = {name: test.evidence() for name, test in self._tests.items()}
        mix = {f"mix: {name}": found for name, found in self._mix.evidence().items()}
        return {name: asdict(found) for name, found in (scores | mix).items()}

    def __str__(self) -> str:
        tests = "; ".join(f"{name}: {test.evidence()}" for name, test in self._tests.items())
        shifts = f"; shifted: {', '.join(self._mix.shifts)}" if self._mix.shifts else ""
        return f"version {self.candidate} against {self.served}: {tests}{shifts}"

    def _count(self, pair: ComparedPair) -> None:
        if pair.answers is None:
            return
        candidate, served = pair.answers
        self._tests[pair.comparison].add(candidate.score, served.score)
        if pair.comparison == CANARY:
            first = self._baseline[pair.prompt]
            self._tests[START].add(candidate.score, fmean(answer.score for answer in first))
            self._mix.add(candidate.action, candidate.length, [(one.action, one.length) for one in first])

    def _judged(self) -> tuple[Decision, str] | None:
        worse = [name for name, test in self._tests.items() if test.verdict is Verdict.WORSE]
        if worse:
            return Decision.REFUSED, f"worse by more than {self._settings.margin:g}: {', '.join(worse)}"
        if self._mix.shifts:
            shifted = ", ".join(self._mix.shifts)
            return Decision.HELD, f"its mix of actions differs by more than {self._settings.mix_bound:g}: {shifted}"
        if all(map(self._is_shown, self._compared)):
            return Decision.PROMOTED, f"not worse by more than {self._settings.margin:g}"  # live-2
        if any(not self._is_shown(name) and self._counted[name] >= self._most(name) for name in self._compared):
            return Decision.UNDECIDED, "the pairs ran out before a verdict"
        return None

    @property
    def _compared(self) -> list[str]:
        return [CANARY, SHADOW] if SHADOW in self._tests else [CANARY]

    def _is_shown(self, comparison: str) -> bool:
        """Whether the pairs of this comparison show all that they can show."""
        names = [CANARY, START] if comparison == CANARY else [comparison]
        passed = all(self._tests[name].verdict is Verdict.NOT_WORSE for name in names)
        return passed and (comparison != CANARY or self._mix.is_within)

    def _most(self, comparison: str) -> int:
        return self._settings.pairs if comparison == CANARY else self._settings.shadow_pairs

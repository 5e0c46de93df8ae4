"""Tests, pair by pair, whether a candidate is not worse than the served policy by more than a margin.

A pair holds the scores of both policies, in [0, 1], for one prompt. `d` is the candidate's score minus the other one.
Evidence against "the mean of d is at most m" after t pairs is the wealth of a gambler who bets against it, averaged
over several fixed bets b:

    E_t(m) = mean over b of  prod over i <= t of  (1 - b + b (1 + d_i) / (1 + m))

If the mean of d, given all pairs before, never exceeds m, then E_t is a nonnegative supermartingale that starts at 1.
By Ville's inequality the probability that it ever reaches 1 / error_rate is at most error_rate, so the test may look
after each pair and stop whenever it likes. No shape of the differences is assumed.

The candidate is `not_worse` when E_t(-margin) reaches 1 / error_rate, and `worse` (by more than the margin) when the
same evidence of the negated differences reaches 1 / worse_error_rate, which is the error rate unless it is given. Pairs
must arrive in an order that does not depend on their scores.

    live-1: The probability that a candidate whose mean difference is -margin or less is ever found `not_worse` is at
        most `error_rate`, for any number of pairs and any time of stopping.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

BETS = 0.95 * 2.0 ** -np.arange(6.0)
"""Shares of the wealth that are bet. Large ones decide fast where most pairs are ties, small ones where few are."""
BISECTIONS = 40


class Verdict(StrEnum):
    """The result of a test so far."""

    NOT_WORSE = "not_worse"
    """The candidate is not worse by more than the margin."""
    WORSE = "worse"
    """The candidate is worse by more than the margin."""
    UNDECIDED = "undecided"
    """The pairs so far show neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers behind a verdict."""

    verdict: Verdict
    pairs: int
    mean: float | None
    """The mean difference; None without pairs."""
    lower: float
    """The mean of the differences is above this, at the error rate and at any time of stopping."""
    upper: float
    """The mean of the differences is below this, at `worse_error_rate` and at any time of stopping."""
    not_worse: float
    """The largest evidence so far for `not_worse`, as a logarithm; it decides at `threshold`."""
    worse: float
    """The largest evidence so far for `worse`, as a logarithm."""
    threshold: float
    """The logarithm of 1 / error_rate, at which the candidate is not worse."""
    worse_threshold: float
    """The logarithm of 1 / worse_error_rate, at which it is worse."""

    def __str__(self) -> str:
        mean = "no pairs" if self.mean is None else f"mean difference {self.mean:+.3f}"
        bounds = f"between {self.lower:+.3f} and {self.upper:+.3f}"
        logs = f"{self.not_worse:.2f} of {self.threshold:.2f}, for worse {self.worse:.2f} of {self.worse_threshold:.2f}"
        return f"{self.verdict} after {self.pairs} pairs: {mean}, {bounds}; log evidence for not worse {logs}"


def log_evidence(differences: np.ndarray, mean: float) -> np.ndarray:
    """The logarithm of E_t(mean) for each t; the last axis of `differences` is time."""
    logs = np.cumsum(_log_growth(differences, mean), axis=-1)
    return np.logaddexp.reduce(logs, axis=0) - math.log(len(BETS))


class PairedTest:
    """The sequential test of one candidate. A verdict, once reached, stays."""

    def __init__(self, *, margin: float, error_rate: float, worse_error_rate: float | None = None):
        rates = (margin, error_rate, error_rate if worse_error_rate is None else worse_error_rate)
        if not all(0 < rate < 1 for rate in rates):
            raise ValueError(f"margin and error rates {rates}: must be above 0 and below 1")
        self._margin = margin
        self._thresholds = {Verdict.NOT_WORSE: -math.log(rates[1]), Verdict.WORSE: -math.log(rates[2])}
        self._differences: list[float] = []
        self._logs = {Verdict.NOT_WORSE: np.zeros(len(BETS)), Verdict.WORSE: np.zeros(len(BETS))}
        self._most = {Verdict.NOT_WORSE: 0.0, Verdict.WORSE: 0.0}
        self.verdict = Verdict.UNDECIDED

    @property
    def pairs(self) -> int:
        """How many pairs were added."""
        return len(self._differences)

    def add(self, candidate: float, other: float) -> Verdict:
        """Take in the scores of a pair; the verdict so far."""
        if not 0 <= candidate <= 1 or not 0 <= other <= 1:
            raise ValueError(f"scores {candidate} and {other}: must be in [0, 1]")
        difference = candidate - other
        self._differences.append(difference)
        for verdict, sign in ((Verdict.NOT_WORSE, 1.0), (Verdict.WORSE, -1.0)):
            self._logs[verdict] += _log_growth(np.array(sign * difference), -sign * self._margin)
            wealth = float(np.logaddexp.reduce(self._logs[verdict])) - math.log(len(BETS))
            self._most[verdict] = max(self._most[verdict], wealth)
            if self.verdict is Verdict.UNDECIDED and wealth >= self._thresholds[verdict]:  # live-1
                self.verdict = verdict
        return self.verdict

    def evidence(self) -> Evidence:
        """The numbers so far."""
        differences = np.array(self._differences)
        return Evidence(
            verdict=self.verdict,
            pairs=self.pairs,
            mean=float(differences.mean()) if self.pairs else None,
            lower=_bound(differences, self._thresholds[Verdict.NOT_WORSE]),
            upper=-_bound(-differences, self._thresholds[Verdict.WORSE]),
            not_worse=self._most[Verdict.NOT_WORSE],
            worse=self._most[Verdict.WORSE],
            threshold=self._thresholds[Verdict.NOT_WORSE],
            worse_threshold=self._thresholds[Verdict.WORSE],
        )


def _bound(differences: np.ndarray, threshold: float) -> float:
    """The largest mean against which the evidence has reached the threshold at some time; -1 without any."""
    low, high = -1.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_refuted = float(log_evidence(differences, middle).max(initial=0.0)) >= threshold
        low, high = (middle, high) if is_refuted else (low, middle)
    return low


def _log_growth(differences: np.ndarray, mean: float) -> np.ndarray:
    """The logarithm of each bet's growth at each pair, with the bets as the first axis."""
    bets = BETS.reshape(-1, *(1,) * differences.ndim)
    return np.log1p(bets * ((1 + differences) / (1 + mean) - 1))

"""Stretches of time, and how much of them others cover."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time, in seconds."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop - self.start

    def overlap(self, other: "Interval") -> float:
        """The seconds that both have."""
        return max(0.0, min(self.stop, other.stop) - max(self.start, other.start))


class Union:
    """The time that at least one of many intervals covers."""

    def __init__(self, intervals: Iterable[Interval]):
        self._parts: list[Interval] = []
        for one in sorted(intervals, key=lambda each: each.start):
            if self._parts and one.start <= self._parts[-1].stop:
                last = self._parts.pop()
                self._parts.append(Interval(last.start, max(last.stop, one.stop)))
            else:
                self._parts.append(one)
        self._starts = [one.start for one in self._parts]

    def within(self, interval: Interval) -> float:
        """The covered seconds of this interval."""
        first = max(0, bisect_right(self._starts, interval.start) - 1)
        covered = 0.0
        for one in self._parts[first:]:
            if one.start >= interval.stop:
                break
            covered += one.overlap(interval)
        return covered

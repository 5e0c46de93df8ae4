"""Rules that say when a holiday is."""

from dataclasses import dataclass
from datetime import date, timedelta

SATURDAY, SUNDAY = 5, 6


@dataclass(frozen=True)
class Fixed:
    """The same date each year; there is none in years without this date (February 29)."""

    name: str
    month: int
    day: int
    observed: bool = False

    def in_year(self, year):
        """The day off for the holiday of this year, None if there is none."""
        try:
            day = date(year, self.month, self.day)
        except ValueError:
            return None
        if self.observed and day.weekday() == SATURDAY:
            return day - timedelta(days=1)
        if self.observed and day.weekday() == SUNDAY:
            return day + timedelta(days=1)
        return day


@dataclass(frozen=True)
class NthWeekday:
    """The n-th weekday of a month, from its end for a negative n."""

    name: str
    month: int
    weekday: int
    n: int

    def in_year(self, year):
        """The holiday of this year."""
        if self.n > 0:
            first = date(year, self.month, 1)
            return first + timedelta(days=(self.weekday - first.weekday()) % 7 + 7 * (self.n - 1))
        after = date(year + self.month // 12, self.month % 12 + 1, 1)
        return after - timedelta(days=(after.weekday() - self.weekday - 1) % 7 + 1 - 7 * (self.n + 1))

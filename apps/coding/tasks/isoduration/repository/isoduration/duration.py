"""The duration."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from isoduration.months import add_months

DAY = 86_400


@dataclass(frozen=True)
class Duration:
    """Months and seconds, which do not have different signs."""

    months: int = 0
    seconds: Fraction = 0

    def __post_init__(self):
        if self.months * self.seconds < 0:
            raise ValueError("months and seconds must have the same sign")

    def __neg__(self):
        return Duration(-self.months, -self.seconds)

    def add_to(self, moment):
        """The date, or date and time, that is later by this duration."""
        moved = add_months(moment, self.months) if self.months else moment
        if not isinstance(moment, datetime) and self.seconds % DAY:
            raise ValueError(f"{self} has parts of a day, which a date has not")
        return moved + timedelta(microseconds=int(self.seconds * 1_000_000))

    def __str__(self):
        from isoduration.text import to_text

        return to_text(self)

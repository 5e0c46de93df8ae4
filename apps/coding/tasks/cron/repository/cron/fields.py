"""The five fields of a line."""

from dataclasses import dataclass, field

MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
WEEKDAYS = "sun mon tue wed thu fri sat".split()


class CronError(ValueError):
    """A line that is not in the format."""


@dataclass(frozen=True)
class Field:
    """What a field is called, and which values it may have."""

    name: str
    low: int
    high: int
    names: dict = field(default_factory=dict)

    def value(self, text):
        """The number of a number or a name."""
        number = self.names.get(text.lower(), int(text) if text.isdecimal() else None)
        if number is None or not self.low <= number <= self.high:
            raise CronError(f"{self.name}: {text!r} is not from {self.low} to {self.high}")
        return number

    def values(self, text):
        """All values that the text of a field allows."""
        found = set()
        for part in text.split(","):
            span, slash, step = part.partition("/")
            first, dash, last = span.partition("-")
            if span == "*":
                start, end = self.low, self.high
            else:
                start = self.value(first)
                end = self.value(last) if dash else start
            if slash and (not step.isdecimal() or int(step) == 0 or not (dash or span == "*")):
                raise CronError(f"{self.name}: wrong step in {part!r}")
            if start > end:
                raise CronError(f"{self.name}: {part!r} goes backwards")
            found.update(range(start, end + 1, int(step or 1)))
        return frozenset(found)


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day", 1, 31),
    Field("month", 1, 12, {name: number for number, name in enumerate(MONTHS, 1)}),
    Field("weekday", 0, 7, {name: number for number, name in enumerate(WEEKDAYS)}),
)

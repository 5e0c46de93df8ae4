"""Durations as text."""

import re
from fractions import Fraction

from isoduration.duration import DAY, Duration

PATTERN = re.compile(
    r"(?P<sign>-)?P(?=.)(?:(?P<years>\d+)Y)?(?:(?P<months>\d+)M)?(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?=.)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+(?:\.\d{1,6})?)S)?)?"
)
SECONDS = {"weeks": 7 * DAY, "days": DAY, "hours": 3600, "minutes": 60, "seconds": 1}


class DurationError(ValueError):
    """Text that is no duration."""


def parse(text):
    """The duration of a text."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise DurationError(f"not a duration: {text!r}")
    parts = {name: Fraction(number or 0) for name, number in match.groupdict().items() if name != "sign"}
    seconds = sum(parts[name] * size for name, size in SECONDS.items())
    duration = Duration(int(12 * parts["years"] + parts["months"]), seconds)
    return -duration if match["sign"] else duration


def to_text(duration):
    """The text of a duration."""
    years, months = divmod(duration.months, 12)
    days, seconds = divmod(int(duration.seconds), DAY)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    date = _join((years, "Y"), (months, "M"), (days, "D"))
    time = _join((hours, "H"), (minutes, "M"), (seconds, "S"))
    if not date and not time:
        return "PT0S"
    return f"P{date}T{time}" if time else f"P{date}"


def _join(*parts):
    """The numbers that are not 0 with their letters."""
    return "".join(f"{number}{letter}" for number, letter in parts if number)

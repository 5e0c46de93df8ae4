"""Offsets as text, and as timedeltas."""

import re
from datetime import timedelta

OFFSET = re.compile(
    r"(?:UTC|GMT)?(?P<sign>[+-])(?P<hours>\d{1,2})(?::?(?P<minutes>[0-5]\d)(?::(?P<seconds>[0-5]\d))?)?"
)


class OffsetError(ValueError):
    """Text that is no offset, or an offset of a day or more."""


def parse_offset(text):
    """The timedelta east of UTC."""
    cleaned = text.strip().upper().replace("\u2212", "-")
    if cleaned in ("Z", "UTC", "GMT"):
        return timedelta(0)
    match = OFFSET.fullmatch(cleaned)
    if match is None:
        raise OffsetError(f"not an offset: {text!r}")
    hours, minutes, seconds = (int(match[name] or 0) for name in ("hours", "minutes", "seconds"))
    if hours > 23:
        raise OffsetError(f"an offset is less than a day: {text!r}")
    if match["sign"] == "-":
        hours = -hours
    return timedelta(hours=hours, minutes=minutes, seconds=seconds)


def format_offset(offset):
    """The offset as +HH:MM, with seconds if it has some."""
    if abs(offset) >= timedelta(days=1):
        raise OffsetError(f"an offset is less than a day, not {offset}")
    sign = "-" if offset < timedelta(0) else "+"
    minutes, seconds = divmod(abs(offset) // timedelta(seconds=1), 60)
    text = f"{sign}{minutes // 60:02}:{minutes % 60:02}"
    return f"{text}:{seconds:02}" if seconds else text

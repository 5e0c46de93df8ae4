"""Times that carry an offset."""

import re
from datetime import datetime, timezone

from utcoffset.offsets import OffsetError, parse_offset

TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?)\s*(.*)")


def parse_time(text, default=None):
    """The aware datetime of a date, a time and an offset."""
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a date and time: {text!r}")
    local, offset = match.groups()
    if not (offset := offset or default):
        raise OffsetError(f"no offset in {text!r}, and no default")
    return datetime.fromisoformat(local).replace(tzinfo=timezone(parse_offset(offset)))


def to_utc(text, default=None):
    """The same moment in UTC."""
    return parse_time(text, default).astimezone(timezone.utc)


def convert(text, offset, default=None):
    """The same moment at another offset."""
    return parse_time(text, default).astimezone(timezone(parse_offset(offset)))

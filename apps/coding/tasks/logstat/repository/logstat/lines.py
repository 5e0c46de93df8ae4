"""Lines of a log."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Entry:
    """One request."""

    time: datetime
    method: str
    path: str
    status: int
    milliseconds: int


def parse(line):
    """The entry of a line; raises ValueError when it is none."""
    time, method, target, status, milliseconds = line.split()
    entry = Entry(datetime.fromisoformat(time), method, target.partition("?")[0], int(status), int(milliseconds))
    if not (100 <= entry.status <= 599 and entry.milliseconds >= 0):
        raise ValueError(f"impossible status or time: {line!r}")
    return entry


def read(lines):
    """All entries, and the numbers of the lines that are none. Empty lines are skipped."""
    entries, unreadable = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entries.append(parse(line))
            except ValueError:
                unreadable.append(number)
    return entries, unreadable

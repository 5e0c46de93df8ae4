"""What a number of requests looks like."""

from collections import Counter
from dataclasses import dataclass

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Report:
    """Numbers about some requests."""

    requests: int
    percentiles: dict
    statuses: dict
    paths: list


def percentile(values, percent):
    """The value of the nearest rank; `percent` is a whole number from 1 to 100."""
    if not values:
        raise ValueError("no values")
    if not 1 <= percent <= 100:
        raise ValueError(f"a percentage is from 1 to 100, not {percent}")
    ordered = sorted(values)
    rank = len(ordered) * percent // 100
    return ordered[min(rank, len(ordered) - 1)]


def report(entries, top=3):
    """The report of these entries, with the `top` paths that have most requests, ties by name."""
    times = [entry.milliseconds for entry in entries]
    statuses = Counter(f"{entry.status // 100}xx" for entry in entries)
    paths = Counter(entry.path for entry in entries)
    return Report(
        requests=len(entries),
        percentiles={f"p{percent}": percentile(times, percent) for percent in PERCENTS} if times else {},
        statuses=dict(sorted(statuses.items())),
        paths=sorted(paths.items(), key=lambda item: (-item[1], item[0]))[:top],
    )

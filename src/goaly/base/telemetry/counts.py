"""Counts of what happens in an episode, by name. They travel with its group, and their sums are metrics of a step.

    count("environment/timeouts")

Environments, tools and verifiers count where it happens. Outside of an episode nothing is counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COUNTS: ContextVar[Counter[str] | None] = ContextVar("_COUNTS", default=None)


def count(name: str, times: int = 1) -> None:
    """Count something that has happened in the running episode. `name` is the metric, such as `game/wrong_moves`."""
    if (counts := _COUNTS.get()) is not None:
        counts[name] += times


@contextmanager
def counting(counts: Counter[str] | None = None) -> Iterator[Counter[str]]:
    """The block of an episode, with what is counted in it and in the tasks that it starts; added to these counts."""
    counts = Counter[str]() if counts is None else counts
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)

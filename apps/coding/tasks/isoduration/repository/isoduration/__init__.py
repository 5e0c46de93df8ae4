"""ISO 8601 durations, with months and years."""

from isoduration.duration import Duration
from isoduration.text import DurationError, parse

__all__ = ["Duration", "DurationError", "parse"]

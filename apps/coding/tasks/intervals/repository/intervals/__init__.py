"""Which intervals overlap."""

from intervals.tree import IntervalTree

__all__ = ["IntervalTree"]

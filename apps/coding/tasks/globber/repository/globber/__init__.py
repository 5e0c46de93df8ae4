"""Glob patterns for paths, with ** and classes."""

from globber.paths import matches
from globber.segment import PatternError
from globber.selection import select

__all__ = ["PatternError", "matches", "select"]

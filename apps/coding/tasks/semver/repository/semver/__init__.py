"""Versions, ranges and a small resolver."""

from semver.ranges import Range
from semver.resolver import Conflict, resolve
from semver.version import Version, VersionError

__all__ = ["Conflict", "Range", "Version", "VersionError", "resolve"]

"""Versions."""

import re
from functools import total_ordering

NUMBER = r"(0|[1-9]\d*)"
PATTERN = re.compile(rf"{NUMBER}\.{NUMBER}\.{NUMBER}(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+[0-9A-Za-z.-]+)?")


class VersionError(ValueError):
    """Text that is no version or no range."""


@total_ordering
class Version:
    """Three numbers, and the identifiers of a pre-release."""

    def __init__(self, major, minor, patch, pre=()):
        self.numbers = (major, minor, patch)
        self.pre = tuple(pre)

    @classmethod
    def parse(cls, text):
        """The version of a text."""
        match = PATTERN.fullmatch(text)
        if match is None:
            raise VersionError(f"not a version: {text!r}")
        *numbers, pre = match.groups()
        return cls(*map(int, numbers), pre.split(".") if pre else ())

    def _key(self):
        """What versions are ordered by; a release comes after its pre-releases."""
        return (self.numbers, not self.pre, self.pre)

    def __eq__(self, other):
        return isinstance(other, Version) and self._key() == other._key()

    def __lt__(self, other):
        return self._key() < other._key()

    def __hash__(self):
        return hash(self._key())

    def __str__(self):
        text = ".".join(map(str, self.numbers))
        return f"{text}-{'.'.join(self.pre)}" if self.pre else text

    __repr__ = __str__

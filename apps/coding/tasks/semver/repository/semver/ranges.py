"""Ranges of versions."""

import operator
import re

from semver.version import Version, VersionError

COMPARISONS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
PART = re.compile(r"(<=|>=|<|>|=|~|\^|)(\S+)")


def _comparisons(part):
    """The pairs of operator and version that a part of a range stands for."""
    sign, text = PART.fullmatch(part).groups()
    if not sign and text == "*":
        return [(">=", Version(0, 0, 0))]
    version = Version.parse(text)
    major, minor, _ = version.numbers
    if sign == "~":
        return [(">=", version), ("<", Version(major, minor + 1, 0))]
    if sign == "^":
        return [(">=", version), ("<", Version(major + 1, 0, 0))]
    return [(sign or "=", version)]


class Range:
    """Sets of comparisons; a version is in the range if it satisfies all comparisons of one set."""

    def __init__(self, sets, text):
        self.sets = sets
        self.text = text

    @classmethod
    def parse(cls, text):
        """The range of a text."""
        sets = []
        for one in text.split("||"):
            if not one.split():
                raise VersionError(f"an empty set of comparisons: {text!r}")
            sets.append([comparison for part in one.split() for comparison in _comparisons(part)])
        return cls(sets, text)

    def __contains__(self, version):
        return any(all(COMPARISONS[sign](version, bound) for sign, bound in one) for one in self.sets)

    def __str__(self):
        return self.text

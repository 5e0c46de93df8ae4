"""Patches as text, and as hunks."""

import re
from dataclasses import dataclass

HEADER = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@.*")


class PatchError(ValueError):
    """A patch that cannot be read, or does not fit."""


@dataclass(frozen=True)
class Hunk:
    """Where a change is, and its lines: pairs of a sign (" ", "-" or "+") and a text."""

    old_start: int
    new_start: int
    lines: tuple

    @property
    def old(self):
        """The texts that it replaces."""
        return [text for sign, text in self.lines if sign != "+"]

    @property
    def new(self):
        """The texts that it brings."""
        return [text for sign, text in self.lines if sign != "-"]

    def __str__(self):
        header = f"@@ -{self.old_start},{len(self.old)} +{self.new_start},{len(self.new)} @@\n"
        return header + "".join(f"{sign}{text}\n" for sign, text in self.lines)


def parse(patch):
    """The hunks of a patch."""
    hunks, lines = [], patch.splitlines()
    at = 0
    while at < len(lines):
        header = HEADER.fullmatch(lines[at])
        if header is None:
            raise PatchError(f"line {at + 1}: not a hunk: {lines[at]!r}")
        at += 1
        old_start, old_count, new_start, new_count = map(int, header.groups())
        body = []
        while at < len(lines) and not lines[at].startswith("@@"):
            sign, text = lines[at][:1], lines[at][1:]
            if sign not in ("", " ", "-", "+"):
                raise PatchError(f"line {at + 1}: not a line of a hunk: {lines[at]!r}")
            body.append((sign or " ", text))
            at += 1
        hunk = Hunk(old_start, new_start, tuple(body))
        if (len(hunk.old), len(hunk.new)) != (old_count, new_count):
            raise PatchError(f"line {at}: the counts of the hunk are wrong")
        hunks.append(hunk)
    return hunks

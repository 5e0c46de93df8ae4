"""Patterns of one part of a path, translated to regular expressions."""

import re
from functools import lru_cache


class PatternError(ValueError):
    """A pattern that has no meaning."""


def _class(pattern, start):
    """The regular expression of the class that begins at `start`, and where it ends."""
    at = start + 1
    negated = pattern[at : at + 1] == "!"
    at += negated
    end = pattern.find("]", at + 1)
    if end < 0:
        raise PatternError(f"the class that starts at {start} has no end: {pattern!r}")
    body = pattern[at:end].replace("\\", r"\\").replace("]", r"\]").replace("[", r"\[").replace("^", r"\^")
    return f"[{'^' if negated else ''}{body}]", end + 1


@lru_cache(maxsize=256)
def compile_segment(pattern):
    """A compiled regular expression for one part of a path."""
    pieces, at = [], 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            piece, at = _class(pattern, at)
            pieces.append(piece)
            continue
        if char == "\\":
            at += 1
            if at == len(pattern):
                raise PatternError(f"nothing follows the backslash: {pattern!r}")
            pieces.append(re.escape(pattern[at]))
        else:
            pieces.append({"*": ".*", "?": "."}.get(char) or re.escape(char))
        at += 1
    return re.compile("".join(pieces), re.DOTALL)

"""Patterns of whole paths."""

from globber.segment import compile_segment


def matches(pattern, path):
    """Whether the whole path matches the pattern."""
    return _match(pattern.split("/"), path.split("/"))


def _match(patterns, parts):
    if not patterns:
        return not parts
    first, *rest = patterns
    if first == "**":
        if not rest:
            return bool(parts)
        return any(_match(rest, parts[skipped:]) for skipped in range(1, len(parts)))
    if not parts or not compile_segment(first).fullmatch(parts[0]):
        return False
    return _match(rest, parts[1:])

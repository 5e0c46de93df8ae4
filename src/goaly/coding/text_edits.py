"""Changes of a file's text: a part is replaced, or lines are inserted. The file's line ends stay as they are."""

from __future__ import annotations


class CannotCall(ValueError):
    """A call that cannot be done; the policy reads why."""


def replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """The text with `new` in place of `old`, and the line where that is."""
    if not old:
        raise CannotCall("`old` is empty")
    if _is_dos(text) or (old not in text and _dos(old) in text):
        old, new = _dos(old), _dos(new)
    places, at = [], text.find(old)
    while at >= 0 and len(places) < 10:
        places.append(text.count("\n", 0, at) + 1)
        at = text.find(old, at + 1)
    if not places:
        raise CannotCall("`old` is not in the file; it must be exactly as there, with its blanks")
    if len(places) > 1:
        lines = ", ".join(map(str, places))
        raise CannotCall(f"`old` is more than once in the file, at the lines {lines}; give more of the text around it")
    return text.replace(old, new, 1), places[0]


def inserted(text: str, line: int, new: str) -> tuple[str, int]:
    """The text with `new` behind a line, and the number of its first line."""
    *whole, last = text.split("\n")
    lines = [*(f"{one}\n" for one in whole), *([last] if last else [])]
    if not 0 <= line <= len(lines):
        raise CannotCall(f"line={line}: must be from 0 to {len(lines)}, which is the file's last line")
    end, new = ("\r\n", _dos(new)) if _is_dos(text) else ("\n", new)
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += end
    return "".join([*lines[:line], new if new.endswith("\n") else f"{new}{end}", *lines[line:]]), line + 1


def _is_dos(text: str) -> bool:
    """Whether all lines end with CRLF."""
    return 0 < text.count("\n") == text.count("\r\n")


def _dos(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")

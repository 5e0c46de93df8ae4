"""Pointers as text, and as lists of tokens."""

import re

from pointer.errors import PointerError

WRONG_TILDE = re.compile(r"~(?![01])")


def escape(token):
    """The token as it is written inside a pointer."""
    return token.replace("~", "~0").replace("/", "~1")


def unescape(text):
    """The token that a part of a pointer stands for."""
    if WRONG_TILDE.search(text):
        raise PointerError(f"a ~ must be followed by 0 or 1: {text!r}")
    return text.replace("~0", "~").replace("~1", "/")


def split(pointer):
    """The tokens of a pointer."""
    if not pointer:
        return []
    if not pointer.startswith("/"):
        raise PointerError(f"a pointer starts with /: {pointer!r}")
    return [unescape(part) for part in pointer[1:].split("/")]


def join(tokens):
    """The pointer that has these tokens; integers are indices."""
    return "".join("/" + escape(str(token)) for token in tokens)

"""Reading and changing the part of a document to which a pointer leads."""

import re

from pointer.errors import PointerError
from pointer.tokens import split

INDEX = re.compile(r"0|[1-9][0-9]*")


def _index(token, length, pointer):
    if not INDEX.fullmatch(token):
        raise PointerError(f"{token!r} is not an index in {pointer}")
    if int(token) >= length:
        raise PointerError(f"index {token} is out of range in {pointer}")
    return int(token)


def _step(value, token, pointer):
    if isinstance(value, dict):
        if token not in value:
            raise PointerError(f"no key {token!r} in {pointer}")
        return value[token]
    if isinstance(value, list):
        return value[_index(token, len(value), pointer)]
    raise PointerError(f"{token!r} leads into a {type(value).__name__} in {pointer}")


def _walk(document, tokens, pointer):
    for token in tokens:
        document = _step(document, token, pointer)
    return document


def get(document, pointer):
    """The value at the pointer."""
    return _walk(document, split(pointer), pointer)


def assign(document, pointer, value):
    """Put a value at the pointer; its parent must exist. `-` appends to a list."""
    if not (tokens := split(pointer)):
        raise PointerError("the whole document cannot be replaced")
    parent, last = _walk(document, tokens[:-1], pointer), tokens[-1]
    if isinstance(parent, dict):
        parent[last] = value
    elif isinstance(parent, list) and last == "-":
        parent.append(value)
    elif isinstance(parent, list):
        parent[_index(last, len(parent), pointer)] = value
    else:
        raise PointerError(f"{last!r} leads into a {type(parent).__name__} in {pointer}")


def remove(document, pointer):
    """Take the value at the pointer out of the document, and return it."""
    if not (tokens := split(pointer)):
        raise PointerError("the whole document cannot be removed")
    parent, last = _walk(document, tokens[:-1], pointer), tokens[-1]
    value = _step(parent, last, pointer)
    del parent[last if isinstance(parent, dict) else int(last)]
    return value

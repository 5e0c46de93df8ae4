"""Values and types as text for people."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from goaly.base.config.schema import bounded_members, hints

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}


def show(value: Any) -> str:
    """A value as one would write it in YAML, cut short when long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(show(item) for item in value)}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {show(item)}' for key, item in value.items())}}}"
    else:
        text = '""' if value == "" else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def type_words(annotation: Any, *, with_bounds: bool = False) -> str:
    """A type in words that complete `must be …`."""
    return " or ".join(
        f"{_one_type(kind)} ({_bounds(metadata)})" if with_bounds and metadata else _one_type(kind)
        for kind, metadata in bounded_members(annotation)
    )


def bounds_words(annotation: Any) -> str:
    """The bounds of a type in words that complete `must be …`."""
    return ", or ".join(
        _bounds(metadata) if metadata else _one_type(kind) for kind, metadata in bounded_members(annotation)
    )


def _bounds(metadata: tuple[Any, ...]) -> str:
    limits = {name: limit for item in metadata for name in BOUNDS if (limit := getattr(item, name, None)) is not None}
    if limits.keys() == {"ge", "le"}:
        return f"between {limits['ge']} and {limits['le']}"
    return " and ".join(f"{BOUNDS[name]} {limit}" for name, limit in limits.items()) or "a non-empty text"


def _one_type(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(show, args))}" if len(args) > 1 else show(args[0])
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(map(type_words, args))}"
    if (origin or kind) in (list, tuple):
        return f"a list, each {type_words(args[0])}" if args and args[0] is not Any else "a list"
    if (origin or kind) is dict:
        return f"a mapping, each value {type_words(args[1])}" if args and args[1] is not Any else "a mapping"
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a section ({', '.join(hints(kind))})"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    words |= {type(None): "null", Any: "any value"}
    if kind not in words:
        raise TypeError(f"a config cannot hold {kind!r}")
    return words[kind]

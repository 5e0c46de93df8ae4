"""Errors on their way between a server of sandboxes and its clients: the same classes at both ends."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

from goaly.sandboxes import contract
from goaly.sandboxes.contract import SandboxError

BUILTIN = (OSError, ValueError, TimeoutError)
"""Errors of Python that cross, with their subclasses."""


def fields_of(error: Exception) -> dict[str, Any]:
    """An error's part that crosses."""
    if isinstance(error, OSError) and error.errno is not None:
        return {"class": "OSError", "arguments": [error.errno, error.strerror, error.filename]}
    for known in type(error).__mro__:
        if _class_named(known.__name__) is known:
            return {"class": known.__name__, "arguments": [str(error)]}
    return {"class": "SandboxError", "arguments": [f"{type(error).__name__}: {error}"]}


def error_of(fields: Mapping[str, Any]) -> Exception:
    """The error that crossed. One of a class that is not known here is a SandboxError with its text."""
    name, arguments = str(fields.get("class")), fields.get("arguments") or []
    found = _class_named(name)
    if found is None:
        return SandboxError(f"{name}: {' '.join(map(str, arguments))}")
    return found(*(argument for argument in arguments if argument is not None))


def _class_named(name: str) -> type[Exception] | None:
    found = getattr(contract, name, None) or getattr(builtins, name, None)
    known = isinstance(found, type) and issubclass(found, (SandboxError, *BUILTIN))
    return found if known and not issubclass(found, UnicodeError) else None  # those take other arguments

"""Functions named by a dotted path in the settings. A module of its own, because verifier processes import little."""

import importlib
from collections.abc import Callable
from typing import Any


def function_at(path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; a ValueError if its module has no such function."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"module {module} has no function {name!r}")
    return function

"""The first and the last second of a process that imports torch."""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable
from typing import NoReturn


def import_ahead(modules: Iterable[str]) -> None:
    """Import what this process will need. One that is missing is left for its user to miss.

    The garbage collector finds nothing among a million new functions and classes, but looks: importing takes a fifth
    less without it. What is imported stays to the end; frozen, the collector never looks at it again, nor then, which
    would take seconds.
    """
    atexit.register(gc.freeze)  # called after the handlers of what is imported below; vLLM's unfreezes everything
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Exit with this code, but without taking the interpreter apart: with torch in it, that takes a second and more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)

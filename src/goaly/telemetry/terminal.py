"""The one console of a process: progress, notes and warnings share it, so that none tears another's lines apart.

It is stderr: what a script answers goes to stdout and can be piped on.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> "Console":
    """This process's console."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)

"""The one console of a process: progress, notes and warnings share it, so that none tears another's lines apart.

It is stderr: what a script answers goes to stdout and can be piped on.
"""

import logging
from functools import cache

from rich.console import Console
from rich.text import Text

OURS = ("goaly", "apps", "__main__")


class Terminal(Console):
    """A console whose broken pipe is an error like any other; rich's own ends the process with SystemExit."""

    def on_broken_pipe(self) -> None:
        """Let the BrokenPipeError under way reach whoever prints."""
        raise


@cache
def console() -> Terminal:
    """This process's console."""
    return Terminal(stderr=True, highlight=False)


class TerminalHandler(logging.Handler):
    """Prints records above the live display; tracebacks stay in the file, a line of the error is shown."""

    def __init__(self, console: Terminal):
        super().__init__(logging.WARNING)
        self._console = console
        self.addFilter(lambda record: record.levelno >= logging.ERROR or record.name.split(".")[0] in OURS)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            style = "red" if record.levelno >= logging.ERROR else "yellow"
            text = f"{record.levelname.lower()}: {record.getMessage()}"
            if record.exc_info and record.exc_info[1] is not None:
                error = record.exc_info[1]
                text += f" ({type(error).__name__}: {error})"
            self._console.print(Text(text, style=style), soft_wrap=True)
        except Exception:
            self.handleError(record)

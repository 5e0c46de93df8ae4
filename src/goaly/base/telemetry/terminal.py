"""The console of a process, shared by progress, notes and warnings, so that their lines do not mix.

It writes to stderr; stdout is for the script's results and can be piped.
"""

import logging
from functools import cache

from rich.console import Console
from rich.text import Text

OURS = ("goaly", "apps", "__main__")


class Terminal(Console):
    """A console that raises BrokenPipeError; rich's own ends the process with SystemExit."""

    def on_broken_pipe(self) -> None:
        """Raise the current BrokenPipeError to the caller of `print`."""
        raise


@cache
def console() -> Terminal:
    """This process's console."""
    return Terminal(stderr=True, highlight=False)


class TerminalHandler(logging.Handler):
    """Prints records above the live display; of an error only one line, the traceback is in the log file."""

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

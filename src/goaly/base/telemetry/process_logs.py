"""Sends log records and output to a file for each process under `<run_dir>/logs`, and warnings to the terminal.

A child process calls `quiet` before it imports anything, so that everything it, its engines and their C++ parts write
to stdout and stderr goes to its file. The controller wraps its run in `controller`.
"""

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goaly.base.atomic_files import open_lines

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%H:%M:%S"

logger = logging.getLogger(__name__)


def process_name(name: str, rank: int, count: int) -> str:
    """The name of process `rank` of `count` processes that were spawned under this name."""
    return f"{name}.{rank}" if count > 1 else name


def log_file(run_dir: Path, process: str) -> Path:
    """The log file of the process with this name."""
    return run_dir / "logs" / f"{process}.log"


def quiet(log_file: str | Path) -> None:
    """Send stdout, stderr and log records of this process to the file from now on."""
    path = Path(log_file)
    sys.stdout.flush()
    sys.stderr.flush()
    file = open_lines(path, cut=False)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Python's own objects may have been replaced, and would buffer by blocks now that they lead to a file.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    logging.basicConfig(level=logging.INFO, format=FORMAT, datefmt=TIME_FORMAT, stream=sys.stderr, force=True)
    logging.captureWarnings(True)


@contextlib.contextmanager
def controller(log_file: str | Path) -> Iterator[None]:
    """In this block log records go to the file, and goaly's warnings and all errors to the terminal too."""
    from goaly.base.telemetry.progress import TerminalHandler, console  # imports rich, which quiet processes never need

    to_file = _LogFile(log_file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = [to_file, TerminalHandler(console())]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = handlers
        root.setLevel(level)
        with contextlib.suppress(OSError):  # the disk is full, which `_LogFile` has reported
            to_file.close()


class _LogFile(logging.FileHandler):
    """A log file that reports once that it cannot be written. logging's own prints a traceback for each record."""

    _reported = False

    def _open(self) -> Any:
        return os.fdopen(open_lines(Path(self.baseFilename), cut=False), self.mode, encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._reported:
            self._reported = True
            logger.warning("%s cannot be written, records are lost: %s", self.baseFilename, sys.exc_info()[1])

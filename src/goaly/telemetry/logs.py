"""Where log records and stray output go: a file a process under `<run_dir>/logs`, and warnings to the terminal.

A child process calls `quiet` before it imports anything: what it, its engines and their C++ parts write to stdout and
stderr ends in its file. The controller wraps its run in `controller`.
"""

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
TIME_FORMAT = "%H:%M:%S"


def process_name(name: str, rank: int, count: int) -> str:
    """The name of one of `count` processes that were spawned under a name."""
    return f"{name}.{rank}" if count > 1 else name


def log_file(run_dir: Path, process: str) -> Path:
    """Where the process of this name logs."""
    return run_dir / "logs" / f"{process}.log"


def quiet(log_file: str | Path) -> None:
    """From now on, this process's stdout, stderr and log records go to the file, for good."""
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # The interpreter's own objects may have been replaced, or buffer by the block now that they lead to a file.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    logging.basicConfig(level=logging.INFO, format=FORMAT, datefmt=TIME_FORMAT, stream=sys.stderr, force=True)
    logging.captureWarnings(True)


@contextlib.contextmanager
def controller(log_file: str | Path) -> Iterator[None]:
    """While it lasts, log records go to the file, and warnings of ours and anyone's errors to the terminal too."""
    from goaly.telemetry.terminal import TerminalHandler, console  # imports rich, which quiet processes never need

    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path, encoding="utf-8")
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
        to_file.close()

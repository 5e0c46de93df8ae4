"""Checks that end in each way, for the tests of `bench.gpu`."""

import os
import sys
from pathlib import Path
from typing import Any

PID_FILE = "GPU_CHECK_PID_FILE"
"""Environment variable: where a check that hangs writes the process id of its child."""


def finds() -> dict[str, Any]:
    """Pass."""
    return {"speed": 2.5}


def raises() -> dict[str, Any]:
    """Fail."""
    raise AssertionError("speed is 0, must be at least 1")


def dies() -> dict[str, Any]:
    """End the process, as a CUDA error may."""
    sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
    os.abort()


def hangs() -> dict[str, Any]:
    """Wait for a child that waits for ever."""
    if child := os.fork():
        Path(os.environ[PID_FILE]).write_text(str(child))
        os.wait()
    os.read(os.pipe()[0], 1)
    return {}

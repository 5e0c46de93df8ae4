"""What tests of whole runs share."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launched import LaunchedRun, alive


@contextmanager
def launching(below: Path, model: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """Start runs with folders below this one; whatever is left of them is killed at the end."""
    started: list[LaunchedRun] = []

    def start(*overrides: str, resume: LaunchedRun | None = None, **facts: Any) -> LaunchedRun:
        folder = below / f"run{len(started)}" if resume is None else resume.folder
        run = LaunchedRun(folder, model, *overrides, resume=resume is not None, **facts)
        started.append(run)
        return run

    try:
        yield start
    finally:
        for run in started:
            for pid in [*run.processes(), run.process.pid]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            run.process.wait()


@pytest.fixture
def launch(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """Start a run; whatever is left of it is killed after the test."""
    with launching(tmp_path, tiny_model_folder) as start:
        yield start


@pytest.fixture(scope="module")
def launch_shared(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Iterator[Callable[..., LaunchedRun]]:
    """Start a run that several tests look at; whatever is left of it is killed after the last test of the file."""
    with launching(tmp_path_factory.mktemp("shared"), tiny_model_folder) as start:
        yield start

"""What tests of whole runs share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import LaunchedRun, alive, descendants


@pytest.fixture
def launch(tmp_path: Path, tiny_model_folder: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """Start a run; whatever is left of it is killed after the test."""
    started: list[LaunchedRun] = []

    def start(
        *overrides: str, app: str = "grpo", module: str | None = None, resume: LaunchedRun | None = None
    ) -> LaunchedRun:
        folder = tmp_path / f"run{len(started)}" if resume is None else resume.folder
        run = LaunchedRun(folder, tiny_model_folder, *overrides, app=app, module=module, resume=resume is not None)
        started.append(run)
        return run

    yield start
    for run in started:
        for pid in [*descendants(run.process.pid), run.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()

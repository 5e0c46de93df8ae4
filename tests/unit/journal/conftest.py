"""A run whose episodes all tests of the journal read."""

from pathlib import Path

import pytest
from logged_run import LoggedRun


@pytest.fixture(scope="session")
def logged(tmp_path_factory: pytest.TempPathFactory) -> LoggedRun:
    """A run under way. Read only."""
    return LoggedRun(tmp_path_factory.mktemp("logged"))


@pytest.fixture(scope="session")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> LoggedRun:
    """The same run, whose log begins at policy version 1. Read only."""
    run = LoggedRun(tmp_path_factory.mktemp("pruned"))
    run.prune()
    return run


@pytest.fixture
def folder(logged: LoggedRun) -> Path:
    """The folder of the run under way."""
    return logged.folder

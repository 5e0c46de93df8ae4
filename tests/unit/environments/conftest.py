"""Commands of the tests' own environment servers, and the ends of processes."""

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from goaly.environments.server_process import Command

SERVERS = Path(__file__).parent / "servers"
OPENENV = Path(sys.prefix).parent / ".venv-openenv/bin/python"
"""`make test` installs it: openenv's dependencies are not ours."""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Command]:
    """The command that runs one of the servers with arguments."""

    def command_of(server: str, *arguments: str, python: Path | str = sys.executable) -> Command:
        return Command(arguments=[str(python), str(SERVERS / server), *arguments], log=tmp_path / "server.log")

    return command_of


@pytest.fixture
def game(command: Callable[..., Command]) -> Command:
    """The guessing game of `servers/guessing.py`, for up to two sessions."""
    return command("guessing.py", "{fd}", "2", python=OPENENV)


@pytest.fixture
def at_most_4000_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies may have no more."""
    for module in ("base.json_text", "environments.openenv", "environments.http_function"):
        monkeypatch.setattr(f"goaly.{module}.MOST_CHARACTERS", 4000)


class Ends:
    """Processes whose ends a test waits for."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def watch(self, *pids: int) -> None:
        """Watch these, which are alive."""
        self._descriptors += [os.pidfd_open(pid) for pid in pids]

    def wait(self, seconds: float = 30) -> bool:
        """Whether all have ended, or end within this time."""
        return all(select.select([descriptor], [], [], seconds)[0] for descriptor in self._descriptors)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
def ends():
    """Watches the ends of processes."""
    watched = Ends()
    yield watched
    watched.close()

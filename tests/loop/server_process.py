"""A server as a user starts it: a process of its own, whose children tests look at and kill."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launched import END_SECONDS, ROOT, START_SECONDS, as_users_have, descendants, logging_to

from tests.program import Program

SMALL_SERVER = ("port=0", "generator.max_context=128", "generator.max_running=16", "generator.kv_cache_gib=0.05")


class ServerProcess:
    """`python -m apps.serve.main`."""

    def __init__(self, folder: Path, *overrides: str, variables: Mapping[str, str] | None = None):
        self.folder = folder
        self.output = folder.with_suffix(".out")
        self.process = Program(
            "apps.serve.main",
            *(f"folder={folder}", *SMALL_SERVER, *overrides),
            output=self.output,
            variables={**as_users_have(os.environ), **(variables or {})},
            folder=ROOT,
        )

    def url(self) -> str:
        """The address of the API, once it answers."""
        self.wait_for_text(" at http://", START_SECONDS)
        return self.text().partition(" at ")[2].split()[0]

    def wait_for_text(self, text: str, seconds: float = END_SECONDS) -> None:
        """Until it has said this."""
        deadline = time.monotonic() + seconds
        while text not in self.text():
            assert self.process.poll() is None, f"ended before {text!r}\n{self.text()}"
            assert time.monotonic() < deadline, f"no {text!r} within {seconds} s\n{self.text()}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """All its processes but the first."""
        return list({*descendants(self.process.pid), *logging_to(self.folder)} - {self.process.pid})

    def text(self) -> str:
        """What it said."""
        return self.output.read_text()

    def stop(self, signal: int) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(signal)
        return self.process.wait(END_SECONDS)

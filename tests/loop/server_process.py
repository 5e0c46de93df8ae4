"""A server as a user starts it: a process of its own, whose children tests look at and kill."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from launched import END_SECONDS, ROOT, START_SECONDS, descendants, logging_to

from goaly.reward.child import die_with

SMALL_SERVER = ("port=0", "generator.max_context=128", "generator.max_running=16", "generator.kv_cache_gib=0.05")


class ServerProcess:
    """`python -m apps.serve.main`."""

    def __init__(self, folder: Path, *overrides: str, variables: Mapping[str, str] | None = None):
        self.folder = folder
        self.output = folder.with_suffix(".out")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HYPERACTOR_")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "apps.serve.main", f"folder={folder}", *SMALL_SERVER, *overrides],
                cwd=ROOT,
                env={**environment, **(variables or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with, os.getpid()),
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

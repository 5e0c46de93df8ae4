"""A run as a user starts it: a process of its own, whose children tests look at and kill."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.program import SEMAPHORES, Program, ended

Left = TypeVar("Left", set[str], list[int])

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
"""A run that has not begun, or replaced a replica, by then hangs: some ten times what a quiet machine needs."""
END_SECONDS = 60.0
"""A run that has not ended by then, or a process that is still there, is left behind: some ten times what it needs."""
OF_PROGRAM = re.compile(rf"sem\.{SEMAPHORES}(\d+)-")
"""Python keeps the name of a semaphore that nobody uses until its process ends."""
REWARDED = "reward.verifier=tests.loop.verifiers:share_of_digits"
"""Rewards that differ, so that every step changes the policy."""
SMALL = [
    "backlog.groups_per_step=2",
    "backlog.group_size=4",
    "backlog.window=2",
    "backlog.row_length=128",
    "sampling.max_tokens=24",
    "generator.max_context=64",
    "generator.max_running=16",
    "generator.kv_cache_gib=0.05",
    "evaluation.prompts=4",
    "hosts.bind={}",
    "checkpoint.restarts=0",
]


def as_users_have(variables: Mapping[str, str]) -> dict[str, str]:
    """These environment variables without those that Monarch has set in a test's process."""
    return {key: value for key, value in variables.items() if not key.startswith("HYPERACTOR_")}


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def children(pid: int) -> list[int]:
    """The processes that this one started and that live."""
    found: list[int] = []
    for child_list in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, child_list.read_text().split())
    return found


def logging_to(folder: Path) -> dict[int, str]:
    """The processes that log to a run's folder, and the names of their logs: `NAME`, or `NAME.RANK`."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended, or ends
            log = Path(os.readlink(f"/proc/{pid}/fd/2"))
            if log.parent == folder.absolute() / "logs":
                found[pid] = log.stem
    return found


def spawned(folder: Path, name: str = "") -> dict[int, str]:
    """The processes that a run has spawned under a name that starts so, and the names of their logs."""
    logs = logging_to(folder)
    started = {child for pid in logs for child in children(pid) if logs.get(child) == logs[pid]}
    return {pid: log for pid, log in logs.items() if log.startswith(name) and pid not in started}


def held_memory(pids: Iterable[int]) -> set[str]:
    """The names in /dev/shm of what these processes map or hold open."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or ends
            links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            found |= {name.rpartition("/")[2] for name in (*links, *mapped) if name.startswith("/dev/shm/")}
    return found & set(os.listdir("/dev/shm"))


def orphaned_memory() -> set[str]:
    """The names in /dev/shm that nobody uses: left behind by a process that has ended."""
    named = set(os.listdir("/dev/shm"))
    named -= held_memory(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {name for name in named if not ((program := OF_PROGRAM.match(name)) and alive(int(program[1])))}


def orphaned_within(before: set[str], seconds: float = END_SECONDS) -> set[str]:
    """What was orphaned since then and still is after so many seconds."""
    return left_within(lambda: orphaned_memory() - before, seconds)


def left_within(look: Callable[[], Left], seconds: float) -> Left:
    """The last of what `look` finds: nothing, as soon as it finds nothing, or what is there after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


class LaunchedRun:
    """`python -m apps.grpo.main`, or another app, on the tests' tiny model.

    `module` runs in the app's place, with its own arguments first; `config` takes the place of the app's, in `configs`.
    `resume`: the run in the folder goes on.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *overrides: str,
        app: str = "grpo",
        module: str | None = None,
        config: str | None = None,
        arguments: Sequence[str] = (),
        resume: bool = False,
    ):
        self.folder = folder
        self.output = folder.with_suffix(".out")
        if resume:
            settings = ["--resume", str(folder), *overrides]
        else:
            settings = [
                "--config",
                f"configs/{config or f'{app}/tiny.yaml'}",
                f"model.path={model}",
                f"run_dir={folder}",
            ]
            settings += [*SMALL, *overrides]
        self.process = Program(
            module or f"apps.{app}.main",
            *arguments,
            *settings,
            output=self.output,
            variables=as_users_have(os.environ),
            folder=ROOT,
        )

    def wait_for_steps(self, count: int, seconds: float = START_SECONDS) -> None:
        """Until so many steps are in `metrics.jsonl`."""
        self._until(lambda: self.steps() >= count, seconds, f"{count} steps")

    def wait_for_text(self, text: str, seconds: float = END_SECONDS) -> None:
        """Until it has said this."""
        self._until(lambda: text in self.text(), seconds, repr(text))

    def steps(self) -> int:
        """How many steps were recorded."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def processes(self) -> list[int]:
        """All processes of the run but its controller."""
        return list({*descendants(self.process.pid), *logging_to(self.folder)} - {self.process.pid})

    def kill(self, name: str) -> None:
        """`kill -9` of the process spawned under a name that starts so, or of the rank `NAME.RANK`."""
        (pid,) = self.spawned(name)
        os.kill(pid, signal.SIGKILL)

    def spawned(self, name: str) -> list[int]:
        """The processes spawned under a name that starts so."""
        return sorted(spawned(self.folder, name))

    def wait(self, seconds: float = END_SECONDS) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.text()}") from None

    def text(self) -> str:
        """What it said."""
        return self.output.read_text()

    def summary(self) -> dict[str, Any]:
        """Its `summary.json`."""
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a JSONL file of the run folder."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"ended before {what}\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s\n{self.text()}"
            time.sleep(0.05)


def assert_whole(run: LaunchedRun, steps: int) -> None:
    """Every step was recorded once, and every group was trained once."""
    assert [step["policy_version"] for step in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    summary = run.summary()
    assert summary["policy_version"] == steps
    assert summary["admitted"] == summary["trained"] == 2 * steps
    assert (summary["rejected"], summary["failed"], summary["reasons"]) == (0, 0, {})


def replayed(run: LaunchedRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m goaly.replay` with this run's folder."""
    return ended("goaly.replay", str(run.folder), *arguments, below=run.folder.parent, seconds=START_SECONDS)


def gone_within(pids: list[int], seconds: float = END_SECONDS) -> list[int]:
    """Those of these processes that are still alive after so many seconds."""
    return left_within(lambda: [pid for pid in pids if alive(pid)], seconds)

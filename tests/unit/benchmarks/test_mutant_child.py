"""A mutant's process hangs only with all that it started, and leaves none of them behind."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from bench import mutant_child
from bench.mutant_child import Child, family


def states(*one_each: tuple[str, int]) -> dict[int, list[str]]:
    """Processes in these states that have used the processor for so long."""
    return {pid: [state, *"0" * 10, str(ticks), "0", "0", "0"] for pid, (state, ticks) in enumerate(one_each)}


def test_a_child_hangs_when_it_and_all_that_it_started_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(100))
    monkeypatch.setattr(mutant_child, "time", SimpleNamespace(monotonic=lambda: 3600 * (next(hours) // 2)))
    child = Child(mutant="", pid=0, anew=False, active=0.0)
    for told, hangs in [
        (states(("S", 3), ("S", 5)), False),
        (states(("S", 3), ("S", 6)), False),  # the one that it waits for works
        (states(("S", 3), ("R", 6)), False),
        (states(("S", 3), ("S", 6)), True),
    ]:
        monkeypatch.setattr(mutant_child, "family", lambda pid, told=told: told)
        assert child.hangs() == hangs


STARTS = """
import multiprocessing, os, subprocess, sys
os.setpgid(0, 0)
queue = multiprocessing.get_context("spawn").Queue()
subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True)
print(queue._rlock._semlock.name, flush=True)
input()
"""


def test_an_ended_child_leaves_no_process_and_no_semaphore() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        semaphore = f"/dev/shm/sem.{started.stdout.readline().decode().strip().lstrip('/')}"
        assert os.path.exists(semaphore)
        below = family(started.pid)
        assert len(below) == 3  # with the one that removes semaphores
        Child(mutant="", pid=started.pid, anew=False).end()
        started.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                select.select([os.pidfd_open(pid)], [], [])  # until it has ended
    assert not os.path.exists(semaphore)

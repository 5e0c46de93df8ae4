"""Shared memory without names, with real kills: weights-5, and base-3."""

import asyncio
import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.base.errors import WeightsError
from goaly.base.process import ExitWatch, this_process
from goaly.weights.shared_memory import Segment

MEGABYTE = 1 << 20


def child(work: Callable[[Connection], None]) -> tuple[int, Connection]:
    """A forked process that does this work, then waits to be killed."""
    here, there = Pipe()
    pid = os.fork()
    if pid == 0:
        here.close()  # so that this end hears of the other's, and nothing is left of a test that failed
        faulthandler.disable()
        try:
            work(there)
            there.recv()
        finally:
            os._exit(0)
    return pid, here


def reap(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    reap(pid)


def shared_bytes() -> int:
    """Shared memory in use on this host."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def own_segment(size: int) -> Callable[[Connection], None]:
    def work(there: Connection) -> None:
        segment = Segment.create(size)
        segment.tensor(torch.float32, (size // 4,), 0).fill_(7.0)
        there.send(segment.handle)
        there.poll(None)  # the segment is let go with the process

    return work


def test_a_killed_owners_memory_stays_with_its_readers_and_is_free_after_them() -> None:
    size = 256 * MEGABYTE
    before, names = shared_bytes(), set(os.listdir("/dev/shm"))
    pid, pipe = child(own_segment(size))
    handle = pipe.recv()
    segment = Segment.open(handle)
    values = segment.tensor(torch.float32, (size // 4,), 0)
    assert shared_bytes() - before > 0.7 * size
    kill(pid)
    assert bool((values == 7.0).all())
    with pytest.raises(WeightsError, match="its owner must be alive"):
        Segment.open(handle)
    del segment, values
    assert shared_bytes() - before < 0.3 * size
    assert {name for name in os.listdir("/dev/shm") if "goaly" in name} <= names


def test_readers_cannot_write() -> None:  # weights-5
    segment = Segment.create(4096)
    pid, _ = child(lambda there: Segment.open(segment.handle).tensor(torch.uint8, (1,), 0).fill_(1))
    assert os.WTERMSIG(reap(pid)) == signal.SIGSEGV
    assert int(segment.tensor(torch.uint8, (1,), 0)) == 0


def test_nobody_can_shrink_a_segment_under_its_readers() -> None:  # weights-5
    segment = Segment.create(4096)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{segment.handle.descriptor}", 0)


def test_a_descriptor_that_was_used_again_is_noticed() -> None:  # weights-5
    first = Segment.create(4096)
    handle = first.handle
    first.close()
    second = Segment.create(4096)
    assert second.handle.descriptor == handle.descriptor
    with pytest.raises(WeightsError, match="its owner closed it or died"):
        Segment.open(handle)
    second.close()


def test_what_the_owner_writes_is_what_readers_see() -> None:
    segment = Segment.create(4096)
    seen = Segment.open(segment.handle).tensor(torch.int64, (2, 3), 64)
    segment.tensor(torch.int64, (6,), 64).copy_(torch.arange(6))
    assert seen.tolist() == [[0, 1, 2], [3, 4, 5]]
    segment.close()


async def ended(mark: Any) -> bool:
    """Whether the watch says within some seconds that the process ended."""
    told = asyncio.Event()
    watch = ExitWatch(mark, told.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(told.wait(), 10)
    watch.close()
    return told.is_set()


async def test_the_end_of_a_killed_process_is_told() -> None:
    pid, pipe = child(lambda there: there.send(this_process()))
    waiting = asyncio.create_task(ended(pipe.recv()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    os.kill(pid, signal.SIGKILL)
    assert await waiting
    reap(pid)


async def test_a_process_that_ended_before_or_whose_id_was_given_on_counts_as_ended() -> None:
    pid, pipe = child(lambda there: there.send(this_process()))
    mark = pipe.recv()
    kill(pid)
    assert await ended(mark)
    assert await ended(replace(this_process(), started=1))


async def test_a_closed_watch_tells_nothing() -> None:
    pid, pipe = child(lambda there: there.send(this_process()))
    told: list[int] = []
    watch = ExitWatch(pipe.recv(), lambda: told.append(pid))
    watch.close()
    kill(pid)
    assert await ended(replace(this_process(), started=1))
    assert told == []

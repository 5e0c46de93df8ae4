"""Spans know who they belong to, let errors pass, and cost nothing while nobody records."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from goaly.base.json_text import read_lines
from goaly.base.telemetry import spans
from goaly.base.telemetry.spans import span


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator:
    spans.configure(tmp_path, "worker")

    def read() -> list[dict]:
        spans.flush()
        return list(read_lines(tmp_path / "spans" / "worker.jsonl"))

    yield read
    spans.configure(None, "worker")


def test_a_span_is_recorded_with_its_time_on_the_shared_clock(recorded):
    before = time.time_ns()
    with span("pull", version=3) as pull:
        pull.note(bytes=10)
    after = time.time_ns()
    (line,) = recorded()
    assert (line["name"], line["args"], line["pid"]) == ("pull", {"version": 3, "bytes": 10}, os.getpid())
    assert before <= line["start_ns"] <= line["stop_ns"] <= after


def test_an_error_passes_and_is_noted(recorded):
    with pytest.raises(asyncio.CancelledError), span("pull"):
        raise asyncio.CancelledError
    assert recorded()[0]["args"] == {"error": "CancelledError"}


def test_spans_of_threads_and_tasks_are_told_apart(recorded):
    async def work(barrier: asyncio.Barrier) -> None:
        with span("generation"):
            await barrier.wait()

    async def both() -> None:
        barrier = asyncio.Barrier(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(work(barrier))
            group.create_task(work(barrier))

    def in_thread() -> None:
        with span("train"):
            pass

    thread = threading.Thread(target=in_thread, name="trainer")
    thread.start()
    thread.join()
    asyncio.run(both())
    train, first, second = recorded()
    assert (train["track"], train["task"]) == ("trainer", 0)
    assert first["thread"] == second["thread"] != train["thread"]
    assert first["task"] != second["task"]


def test_record_keeps_a_stretch_that_began_elsewhere_on_a_track_of_its_own(recorded):
    spans.record("queue_wait", 10, 30, group=7)
    (line,) = recorded()
    assert (line["start_ns"], line["stop_ns"], line["track"], line["task"]) == (10, 30, "queue_wait", None)


def test_nothing_is_recorded_before_configure_nor_after_it_is_withdrawn(tmp_path: Path):
    with span("early") as early:
        early.note(x=1)
    spans.configure(tmp_path, "worker")
    with span("kept"):
        pass
    spans.configure(None, "worker")
    with span("late"):
        pass
    assert [line["name"] for line in read_lines(tmp_path / "spans" / "worker.jsonl")] == ["kept"]


def test_an_unrecorded_span_costs_less_than_two_microseconds():
    def one() -> None:
        with span("pull", version=3):
            pass

    assert min(timeit.repeat(one, number=2000, repeat=10)) / 2000 < 2e-6


def test_spans_are_written_without_flush_when_many_or_a_second_old(recorded, tmp_path: Path):
    file = tmp_path / "spans" / "worker.jsonl"
    for _ in range(spans.BUFFERED_SPANS - 1):
        with span("pull"):
            pass
    assert file.read_text() == ""
    with span("pull"):
        pass
    assert len(list(read_lines(file))) == spans.BUFFERED_SPANS
    later = time.time_ns() + 2 * spans.FLUSH_NANOSECONDS
    spans.record("queue_wait", later, later)
    assert len(list(read_lines(file))) == spans.BUFFERED_SPANS + 1


def test_spans_are_written_when_the_process_ends_and_a_forked_child_adds_none(tmp_path: Path):
    script = (
        "import os, sys\n"
        "from goaly.base.telemetry import spans\n"
        "spans.configure(sys.argv[1], 'worker')\n"
        "with spans.span('own'): pass\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with spans.span('child'): pass\n"
        "    sys.exit(0)\n"  # runs the exit handlers, as a forked helper would
        "os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=30)
    assert [line["name"] for line in read_lines(tmp_path / "spans" / "worker.jsonl")] == ["own"]


def test_a_disk_that_fills_up_does_not_reach_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "worker.jsonl").symlink_to("/dev/full")
    spans.configure(tmp_path, "worker")
    for _ in range(2):
        with span("pull"):
            pass
        spans.flush()
    spans.configure(None, "worker")
    assert caplog.text.count("No space left on device") == 1

"""The log gives back what was appended, notices damage, and survives a kill at any byte."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.base.errors import CorruptLog, RunFailed
from goaly.base.safetensors_file import Buffer
from goaly.journal import log_reader as log
from goaly.journal import log_writer
from goaly.journal.log_reader import Position, durable_mark, frames
from goaly.journal.log_writer import LogWriter

PAYLOADS = st.lists(st.binary(max_size=40), max_size=12)
SEGMENT_BYTES = 150
"""So small that a log of a few frames has several segments."""


def halves(payload: bytes) -> list[Buffer]:
    """The payload in parts of both kinds."""
    middle = len(payload) // 2
    return [payload[:middle], memoryview(payload)[middle:]]


async def write(folder: Path, payloads: list[bytes], *, durable: int | None = None) -> None:
    """Append these; wait for durability after so many."""
    writer = LogWriter(folder, segment_bytes=SEGMENT_BYTES)
    for number, payload in enumerate(payloads):
        if number == durable:
            await writer.durable()
        writer.append(lambda payload=payload: halves(payload))
    writer.close()


def read(folder: Path) -> list[bytes]:
    return [frame.payload for frame in frames(folder)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name) / "log"


@given(before=PAYLOADS, after=PAYLOADS)
async def test_a_log_gives_back_what_was_appended_also_after_it_was_opened_again(before, after) -> None:
    with TemporaryDirectory() as name:
        await write(Path(name), before)
        await write(Path(name), after)
        assert read(Path(name)) == before + after  # journal-2


@given(payloads=PAYLOADS.filter(bool), durable=st.integers(0, 11), data=st.data())
async def test_a_log_cut_behind_its_durable_mark_ends_there_and_goes_on(payloads, durable, data) -> None:
    durable = min(durable, len(payloads))
    with TemporaryDirectory() as name:
        folder = Path(name)
        await write(folder, payloads[:durable])
        mark = (folder / "durable").read_bytes()
        await write(folder, payloads[durable:])
        (folder / "durable").write_bytes(mark)  # as if what came after had not been synced
        last = log.segments(folder)[-1]
        least = durable_mark(folder).offset if int(last.stem) == durable_mark(folder).segment else 0
        os.truncate(last, data.draw(st.integers(least, last.stat().st_size)))
        kept = read(folder)
        assert kept == payloads[: len(kept)]
        assert len(kept) >= durable  # journal-1
        await write(folder, [b"next"])
        assert read(folder) == [*kept, b"next"]  # journal-2


@given(payloads=PAYLOADS.filter(bool), data=st.data())
async def test_a_flipped_or_missing_byte_before_the_durable_mark_is_an_error(payloads, data) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        await write(folder, payloads)
        path = data.draw(st.sampled_from([path for path in log.segments(folder) if path.stat().st_size]))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place : place + data.draw(st.integers(1, 30))]
        path.write_bytes(content)
        with pytest.raises(CorruptLog, match=path.name):  # journal-2
            read(folder)


async def test_a_segment_without_its_last_frame_is_an_error_also_before_an_empty_one(folder: Path) -> None:
    writer = LogWriter(folder, segment_bytes=100)
    for size in (10, 60):
        writer.append(lambda size=size: [bytes(size)])
    await writer.durable()
    writer.close()
    assert [path.stat().st_size > 0 for path in log.segments(folder)] == [True, False]
    os.truncate(folder / "000000.log", (folder / "000000.log").stat().st_size - 60 - log.FRAME.size)
    with pytest.raises(CorruptLog, match=r"000000\.log: ends at offset"):  # journal-2
        read(folder)


@given(payloads=PAYLOADS.filter(bool), data=st.data())
async def test_a_missing_segment_or_mark_is_an_error(payloads, data) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        await write(folder, payloads)
        durable = [path for path in log.segments(folder) if Position(int(path.stem), 0) < durable_mark(folder)]
        data.draw(st.sampled_from([*durable, folder / "durable"])).unlink()
        with pytest.raises(CorruptLog):
            read(folder)


async def test_half_a_write_of_the_mark_leaves_the_mark_before(folder: Path) -> None:
    await write(folder, [b"one"], durable=1)
    before = durable_mark(folder)
    await write(folder, [b"two"], durable=1)
    mark, content = durable_mark(folder), (folder / "durable").read_bytes()
    marks = set()
    for slot in (0, log.PLACE.size):
        damaged = bytearray(content)
        damaged[slot + 3] ^= 255
        (folder / "durable").write_bytes(damaged)
        marks.add(durable_mark(folder))
    assert mark in marks
    assert max(marks) == mark
    assert marks == {before, mark}  # also of a log that was opened again
    (folder / "durable").write_bytes(bytes(len(content)))
    with pytest.raises(CorruptLog, match="durable"):
        durable_mark(folder)


async def test_damage_behind_the_mark_is_reported_and_cut_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    await write(folder, [b"one"])
    mark = durable_mark(folder)
    with (folder / "000000.log").open("ab") as file:
        file.write(b"half a fra")
    await write(folder, [])
    assert "000000.log: the last 10 bytes are torn" in caplog.text
    assert durable_mark(folder) == mark
    assert read(folder) == [b"one"]


async def test_what_is_durable_is_read_while_more_is_written(folder: Path) -> None:
    writer = LogWriter(folder)
    writer.append(lambda: [b"one"])
    await writer.durable()
    first = list(frames(folder))
    writer.append(lambda: [b"two"])
    await writer.durable()
    assert [frame.payload for frame in frames(folder, first[-1].end)] == [b"two"]
    writer.close()


async def test_a_log_of_another_format_is_refused(folder: Path) -> None:
    await write(folder, [b"one"])
    path = folder / "000000.log"
    path.write_bytes(log.segment_header(0, 0, version=9) + path.read_bytes()[log.HEADER.size :])
    with pytest.raises(CorruptLog, match="has format 9, this goaly reads format 2"):
        read(folder)


async def test_after_a_failed_write_every_waiter_gets_the_error_and_nothing_more_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(folder)
    writer.append(lambda: [b"one"])
    await writer.durable()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_writer.os, "writev", full)
    writer.append(lambda: [b"two"])
    with pytest.raises(RunFailed, match="No space left on device"):
        await writer.durable()
    monkeypatch.undo()
    writer.append(lambda: [b"three"])
    with pytest.raises(RunFailed, match="No space left"):  # journal-3
        await writer.durable()
    writer.close()
    assert read(folder) == [b"one"]


async def test_after_a_record_that_cannot_be_encoded_every_waiter_gets_the_error(folder: Path) -> None:  # journal-3
    writer = LogWriter(folder)
    writer.append(lambda: [b"one"])
    writer.append(lambda: [b"two" + 2])  # type: ignore[operator]
    writer.append(lambda: [b"three"])
    for _ in range(2):
        with pytest.raises(RunFailed, match="the run's log cannot be written: can't concat int to bytes"):
            await writer.durable()
    writer.close()
    assert read(folder) == [b"one"]


async def test_a_wait_for_the_disk_tells_how_long_and_for_which_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, disk = LogWriter(folder), threading.Event()
    assert writer.wait is None
    monkeypatch.setattr(log_writer.os, "fdatasync", lambda file: disk.wait(30))
    writer.append(lambda: [b"one"])
    now = itertools.count(100.0, 7.0)
    monkeypatch.setattr(log_writer, "time", SimpleNamespace(monotonic=lambda: next(now), thread_time=time.thread_time))
    waiting = [asyncio.create_task(writer.durable()) for _ in range(2)]
    await asyncio.sleep(0.05)
    waiting[1].cancel()
    await asyncio.wait(waiting[1:])
    assert writer.wait == (14.0, folder / "000000.log")  # asked at 100, the other one at 107, told at 114
    disk.set()
    await waiting[0]
    assert writer.wait is None
    writer.close()


async def write_segments(folder: Path, count: int) -> None:
    """Payloads of which each begins a segment."""
    writer = LogWriter(folder)
    for number in range(count):
        writer.append(lambda number=number: [str(number).encode()], begins_segment=True)
        await writer.durable()
    writer.close()


async def test_a_log_whose_beginning_was_deleted_begins_there_and_goes_on(folder: Path) -> None:
    await write_segments(folder, 5)
    mark = (folder / "durable").read_bytes()
    log.begin_at(folder, 2)
    assert read(folder) == [b"2", b"3", b"4"]
    assert [place.segment for place in log.segment_starts(folder)] == [2, 3, 4]
    log.begin_at(folder, 1)  # nothing comes back
    await write_segments(folder, 1)
    assert read(folder) == [b"2", b"3", b"4", b"0"]
    (folder / "durable").write_bytes(mark)
    log.begin_at(folder, 5)
    (folder / "durable").write_bytes(log.slot_of(Position(1, 0)) * 2)  # the host died before the newer mark was on disk
    assert durable_mark(folder) == Position(5, 0)
    await write_segments(folder, 1)
    assert read(folder) == [b"0", b"0"]


@pytest.mark.parametrize("after", range(3))
async def test_a_deletion_that_is_interrupted_leaves_the_log_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    await write_segments(folder, 4)
    steps = iter(range(after))

    def unlink(path: Path) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        os.unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            log.begin_at(folder, 3)
    assert read(folder) == [b"3"]
    log.begin_at(folder, 3)
    assert sorted(os.listdir(folder)) == ["000003.log", "beginning", "durable"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
async def test_a_damaged_or_missing_beginning_is_an_error(folder: Path, damage: str) -> None:
    await write_segments(folder, 3)
    log.begin_at(folder, 1)
    file = folder / "beginning"
    match damage:
        case "flip":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "remove":
            file.unlink()
    with pytest.raises(CorruptLog, match=r"beginning|000000\.log"):
        read(folder)


def test_a_log_has_one_writer_at_a_time(folder: Path) -> None:
    first = LogWriter(folder)
    with pytest.raises(RunFailed, match="another process still writes this log"):
        LogWriter(folder)
    first.close()
    LogWriter(folder).close()


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=40), at_once=st.integers(1, 50))
def test_a_payload_of_many_parts_is_whole_however_little_is_written_at_once(sizes: list[int], at_once: int) -> None:
    written = bytearray()

    def writev(file: int, buffers: list[Buffer]) -> int:
        some = b"".join(buffers)[:at_once]
        written.extend(some)
        return len(some)

    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_writer, "BUFFERS_PER_WRITE", 3)
        writer = LogWriter(Path(name))
        patched.setattr(log_writer.os, "writev", writev)
        parts = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
        writer.append(lambda: parts)
        writer.close()
        (Path(name) / "000000.log").write_bytes(written)
        assert read(Path(name)) == [b"".join(parts)]


async def test_a_closed_log_refuses_a_waiter(folder: Path) -> None:
    writer = LogWriter(folder)
    writer.close()
    with pytest.raises(RunFailed, match="closed"):
        await writer.durable()

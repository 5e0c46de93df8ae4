"""Appends to a log on a thread of its own.

The thread encodes and writes what has come within a moment, or at once when someone waits for durability. Then it also
syncs, and many waiters share one sync.

A log has one writer at a time.

    journal-1: `durable` returns only when everything appended before it is on disk.
    journal-3: After a failed write or sync, or a record that cannot be encoded, nothing more is written, and every
        waiter gets the error.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from goaly.base.atomic_files import put_file, sync
from goaly.base.errors import CorruptLog, RunFailed
from goaly.base.safetensors_file import Buffer
from goaly.base.watchdog import Work
from goaly.journal.log_reader import (
    PLACE,
    START,
    Position,
    durable_mark,
    frame_header,
    frames,
    segment_file,
    segment_header,
    segments,
    slot_of,
)

logger = logging.getLogger(__name__)

APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
SEGMENT_BYTES = 1 << 30
"""A new segment begins when the last one has this many bytes."""
LINGER_SECONDS = 0.25
"""The log's thread waits this long for more records: it encodes many at once in less time than each by itself."""
BUFFERS_PER_WRITE = 1024
"""Linux's IOV_MAX."""

Encode = Callable[[], Sequence[Buffer]]


class LogWriter:
    """Appends to a log on a thread of its own, after cutting off a torn tail."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._mark = _Mark.of(folder)
        self._end = _cut_torn_tail(folder)
        before = segment_file(folder, self._end.segment - 1)
        self._previous = before.stat().st_size if before.exists() else 0
        self._file = os.open(segment_file(folder, self._end.segment), APPENDING, 0o644)
        sync(folder)
        self._error: Exception | None = None
        self._closed = False
        self._asked: list[float] = []
        """When each of those who wait for durability asked for it."""
        self.cpu_seconds = 0.0
        """CPU time of encoding and writing so far."""
        self._hurry = threading.Event()
        self._work: SimpleQueue[_Payload | _Waiter | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="run log", daemon=True)
        self._thread.start()

    def append(self, encode: Encode, *, begins_segment: bool = False) -> None:
        """Append the payload that `encode` returns in parts. It is called on the log's thread."""
        self._work.put(_Payload(encode, begins_segment))

    async def durable(self) -> None:
        """Return once everything appended so far is on disk (journal-1); RunFailed if it could not be written."""
        if self._closed:
            raise RunFailed("the run's log is closed")
        waiter = _Waiter(asyncio.get_running_loop())
        self._work.put(waiter)
        self._hurry.set()
        asked = time.monotonic()
        self._asked.append(asked)
        try:
            await waiter.done  # Unblocked by the log's thread, also if it cannot write.
        finally:
            self._asked.remove(asked)

    @property
    def wait(self) -> tuple[float, Path] | None:
        """The seconds that a caller has waited for the disk, and the file being written; None if nobody waits."""
        if not self._asked:
            return None
        return time.monotonic() - self._asked[0], segment_file(self._folder, self._end.segment)

    def close(self) -> None:
        """Write and sync what was appended, and end the thread."""
        self._closed = True
        self._work.put(None)
        self._hurry.set()
        self._thread.join()
        os.close(self._file)
        self._mark.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            work = [self._work.get()]
            self._hurry.wait(LINGER_SECONDS)  # for more, unless someone waits for this
            self._hurry.clear()
            with suppress(Empty):
                while True:
                    work.append(self._work.get_nowait())
            closing = None in work
            waiters = [one for one in work if isinstance(one, _Waiter)]
            try:
                with Work("the run's log"):
                    self._write([one for one in work if isinstance(one, _Payload)])
                    if waiters or closing:
                        self._sync()
            except Exception as error:  # also of a record that cannot be encoded
                logger.error("the run's log cannot be written: %s", error, exc_info=not isinstance(error, OSError))
                self._error = error
            self.cpu_seconds = time.thread_time()
            for waiter in waiters:
                waiter.release(self._error)

    def _write(self, payloads: list["_Payload"]) -> None:
        if self._error is not None:
            return  # journal-3
        for one in payloads:
            if one.begins_segment and self._end.offset:
                self._begin_segment()
            if self._end.offset == 0:
                self._append([segment_header(self._end.segment, self._previous)])
            payload = one.encode()
            self._append([frame_header(self._end, payload), *payload])
            if self._end.offset >= self._segment_bytes:
                self._begin_segment()

    def _begin_segment(self) -> None:
        self._sync()
        following = os.open(segment_file(self._folder, self._end.segment + 1), APPENDING, 0o644)
        os.close(self._file)
        self._file = following
        self._previous = self._end.offset
        self._end = Position(self._end.segment + 1, 0)
        sync(self._folder)

    def _append(self, left: list[Buffer]) -> None:
        self._end = Position(self._end.segment, self._end.offset + sum(map(len, left)))
        while left:
            written = os.writev(self._file, left[:BUFFERS_PER_WRITE])
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def _sync(self) -> None:
        if self._error is None and self._end.offset and self._mark.position < self._end:
            os.fdatasync(self._file)
            self._mark.move(self._end)


@dataclass(frozen=True, slots=True)
class _Payload:
    """A payload to append."""

    encode: Encode
    begins_segment: bool


class _Waiter:
    """Someone who waits for durability, on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def release(self, error: Exception | None) -> None:
        with suppress(RuntimeError):  # its event loop has ended
            self._loop.call_soon_threadsafe(self._release, error)

    def _release(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(RunFailed(f"the run's log cannot be written: {error}"))


class _Mark:
    """The durable mark: two slots in a file, of which the newest valid one counts, so that a torn write loses none."""

    def __init__(self, file: int, position: Position, writes: int):
        self._file = file
        self._writes = writes
        self.position = position

    @classmethod
    def of(cls, folder: Path) -> "_Mark":
        """The mark of this log, made if the log is new."""
        path = folder / "durable"
        if not path.exists():
            if there := segments(folder):
                raise CorruptLog(f"{path}: is missing, but {there[0].name} is there")
            put_file(path, slot_of(START) * 2)
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the end of the process
        except OSError:
            os.close(file)
            raise RunFailed(f"{path}: another process still writes this log") from None
        newest = durable_mark(folder)
        return cls(file, newest, 0 if os.pread(file, PLACE.size, PLACE.size) == slot_of(newest) else 1)

    def move(self, position: Position) -> None:
        os.pwrite(self._file, slot_of(position), PLACE.size * (self._writes % 2))
        self._writes += 1
        self.position = position

    def close(self) -> None:
        os.close(self._file)


def _cut_torn_tail(folder: Path) -> Position:
    """Cut off what is torn behind the durable mark; the end of the log."""
    end = Position(durable_mark(folder).segment, 0)
    for frame in frames(folder, end):
        end = frame.end
    for path in segments(folder):
        number, size = int(path.stem), path.stat().st_size
        if number > end.segment:
            path.unlink()
        elif number == end.segment and size > end.offset:
            logger.warning("%s: the last %d bytes are torn, and are cut off", path, size - end.offset)
            os.truncate(path, end.offset)
    return end

"""An append-only log of checksummed frames, in a folder.

    000000.log, 000001.log, ...   segments: a header, then frames in the order in which they were appended
    durable                       the durable mark: how far the log is known to be on disk

A frame is the length of its payload (u64), the XXH3 checksum of its place, its length and its payload (u64), and the
payload. The writer's thread encodes and writes what has come within a moment, or at once when someone waits for
durability. Then it also syncs, and many waiters share one sync.

Invariants
    LG-1  `durable` returns only when everything appended before it is on disk.
    LG-2  A reader gets exactly the appended payloads, in order, up to a point at or behind the durable mark. Damage
          behind the mark is a torn tail: it ends the log, and the next writer cuts it off. Damage before the mark is a
          CorruptLog that names file and offset.
    LG-3  After a failed write or sync, or a record that cannot be encoded, nothing more is written, and every waiter
          gets the error.
    LG-4  A log has one writer at a time.
"""

import asyncio
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from goaly.errors import CorruptLog, RunFailed
from goaly.folder import sync
from goaly.tensor_file import Buffer

logger = logging.getLogger(__name__)

FORMAT = 1
"""The version of the frames and of goaly's records in them."""
HEADER = struct.Struct("<10sHIQQ")
"""Magic, format, number, size of the segment before, checksum."""
FRAME = struct.Struct("<QQ")
PLACE = struct.Struct("<QQQ")
MAGIC = b"goaly log\n"
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
SEGMENT_BYTES = 1 << 30
"""A segment of so many bytes is followed by a new one."""
LINGER_SECONDS = 0.25
"""The log's thread waits so long for more records: it encodes many at once in less time than each by itself."""
BUFFERS_PER_WRITE = 1024
"""Linux's IOV_MAX."""

Encode = Callable[[], Sequence[Buffer]]


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A place in the log."""

    segment: int
    offset: int


START = Position(0, 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """A payload and its place."""

    start: Position
    end: Position
    payload: bytes


class LogWriter:
    """Appends to a log on a thread of its own, after cutting off a torn tail."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._mark = _Mark.of(folder)
        self._end = _cut_torn_tail(folder)
        before = _segment(folder, self._end.segment - 1)
        self._previous = before.stat().st_size if before.exists() else 0
        self._file = os.open(_segment(folder, self._end.segment), APPENDING, 0o644)
        sync(folder)
        self._error: Exception | None = None
        self._closed = False
        self.cpu_seconds = 0.0
        """CPU time of encoding and writing so far."""
        self._hurry = threading.Event()
        self._work: SimpleQueue[Encode | _Waiter | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="run log", daemon=True)
        self._thread.start()

    def append(self, encode: Encode) -> None:
        """Append the payload that `encode` returns in parts. It is called on the log's thread."""
        self._work.put(encode)

    async def durable(self) -> None:
        """Return once everything appended so far is on disk (LG-1); RunFailed if it could not be written."""
        if self._closed:
            raise RunFailed("the run's log is closed")
        waiter = _Waiter(asyncio.get_running_loop())
        self._work.put(waiter)
        self._hurry.set()
        await waiter.done  # Unblocked by the log's thread, also if it cannot write.

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
                self._write([one for one in work if one is not None and not isinstance(one, _Waiter)])
                if waiters or closing:
                    self._sync()
            except Exception as error:  # also of a record that cannot be encoded
                logger.error("the run's log cannot be written: %s", error, exc_info=not isinstance(error, OSError))
                self._error = error
            self.cpu_seconds = time.thread_time()
            for waiter in waiters:
                waiter.release(self._error)

    def _write(self, encoders: list[Encode]) -> None:
        if self._error is not None:
            return  # LG-3
        for encode in encoders:
            if self._end.offset == 0:
                self._append([_segment_header(self._end.segment, self._previous)])
            payload = encode()
            self._append([_frame_header(self._end, payload), *payload])
            if self._end.offset >= self._segment_bytes:
                self._sync()
                following = os.open(_segment(self._folder, self._end.segment + 1), APPENDING, 0o644)
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
            if segments := _segments(folder):
                raise CorruptLog(f"{path}: is missing, but {segments[0].name} is there")
            temporary = path.with_suffix(".new")
            temporary.write_bytes(_slot(START) * 2)
            os.rename(temporary, path)
            sync(folder)
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # LG-4; freed by the end of the process
        except OSError:
            os.close(file)
            raise RunFailed(f"{path}: another process still writes this log") from None
        return cls(file, durable_mark(folder), 0)

    def move(self, position: Position) -> None:
        os.pwrite(self._file, _slot(position), PLACE.size * (self._writes % 2))
        self._writes += 1
        self.position = position

    def close(self) -> None:
        os.close(self._file)


def durable_mark(folder: Path) -> Position:
    """How far this log is known to be on disk; CorruptLog if its mark cannot be read."""
    path = folder / "durable"
    content = path.read_bytes() if path.exists() else b""
    slots = [content[: PLACE.size], content[PLACE.size : 2 * PLACE.size]]
    places = [Position(*PLACE.unpack(slot)[:2]) for slot in slots if len(slot) == PLACE.size]
    valid = [place for place, slot in zip(places, slots, strict=False) if _slot(place) == slot]
    if not valid:
        raise CorruptLog(f"{path}: {'is damaged' if path.exists() else 'is missing'}")
    return max(valid)


def frames(folder: Path, after: Position = START) -> Iterator[Frame]:
    """The frames of a log after this position, which is the start of a segment or the end of a frame (LG-2)."""
    mark, end = durable_mark(folder), after
    previous: int | None = None
    while (path := _segment(folder, end.segment)).exists():
        try:
            with path.open("rb") as file:
                for frame in _frames_of(file, end, previous):
                    yield frame
                    end = frame.end
        except _Damage as damage:
            if end < mark:
                raise CorruptLog(f"{path}, offset {end.offset}: {damage}") from None
            return
        is_cut = end < mark and end.segment == mark.segment  # the next segment may be empty, and so not know its size
        if is_cut or not _segment(folder, end.segment + 1).exists():
            break
        end, previous = Position(end.segment + 1, 0), end.offset
    if end < mark:
        raise CorruptLog(f"{path}: ends at offset {end.offset}; was durable to segment {mark.segment}, {mark.offset}")


class _Damage(Exception):
    """There is no sound frame at this place."""


def _frames_of(file: BinaryIO, place: Position, previous: int | None) -> Iterator[Frame]:
    """The frames of a segment from this place on. `previous` is the size of the segment before, if it was read."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _Damage(f"a segment of {size} bytes")
    version = HEADER.unpack(header)[1]
    if header != _segment_header(place.segment, HEADER.unpack(header)[3], version):
        raise _Damage("a damaged header")
    if previous is not None and HEADER.unpack(header)[3] != previous:
        raise _Damage(f"segment {place.segment - 1:06d}.log has {previous} bytes, must have {HEADER.unpack(header)[3]}")
    if version != FORMAT:
        raise CorruptLog(f"{file.name}: has format {version}, this goaly reads format {FORMAT}")
    offset = max(place.offset, HEADER.size)
    file.seek(offset)
    while offset < size:
        start = file.read(FRAME.size)
        length = FRAME.unpack(start)[0] if len(start) == FRAME.size else size
        end = offset + FRAME.size + length
        if end > size:
            raise _Damage("a frame that ends beyond the end of the file")
        payload = file.read(length)
        if start != _frame_header(Position(place.segment, offset), [payload]):
            raise _Damage("a frame with a wrong checksum")
        yield Frame(Position(place.segment, offset), Position(place.segment, end), payload)
        offset = end


def _segment_header(number: int, previous: int, version: int = FORMAT) -> bytes:
    fields = MAGIC, version, number, previous
    return HEADER.pack(*fields, xxh3_64_intdigest(HEADER.pack(*fields, 0)))


def _frame_header(place: Position, payload: Sequence[Buffer]) -> bytes:
    length = sum(map(len, payload))
    checksum = xxh3_64(seed=xxh3_64_intdigest(PLACE.pack(place.segment, place.offset, length)))
    for part in payload:
        checksum.update(part)
    return FRAME.pack(length, checksum.intdigest())


def _slot(place: Position) -> bytes:
    return PLACE.pack(place.segment, place.offset, xxh3_64_intdigest(struct.pack("<QQ", place.segment, place.offset)))


def _cut_torn_tail(folder: Path) -> Position:
    """Cut off what is torn behind the durable mark; the end of the log."""
    end = Position(durable_mark(folder).segment, 0)
    for frame in frames(folder, end):
        end = frame.end
    for path in _segments(folder):
        number, size = int(path.stem), path.stat().st_size
        if number > end.segment:
            path.unlink()
        elif number == end.segment and size > end.offset:
            logger.warning("%s: the last %d bytes are torn, and are cut off", path, size - end.offset)
            os.truncate(path, end.offset)
    return end


def _segment(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.log"


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]" * 6 + ".log"))

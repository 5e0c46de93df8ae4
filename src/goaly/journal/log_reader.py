"""An append-only log of checksummed frames, in a folder.

    000000.log, 000001.log, ...   segments: a header, then frames in the order in which they were appended
    durable                       the durable mark: how far the log is known to be on disk
    beginning                     if older segments were deleted, the first one that must be there

A frame is the length of its payload (u64), the XXH3 checksum of its place, its length and its payload (u64), and the
payload. `log_writer.py` appends them.

A log begins with its segment 0, or with the one that `begin_at` has recorded before it deleted older ones.

    journal-2: A reader gets exactly the appended payloads, in order, up to a point at or behind the durable mark.
        Damage behind the mark is a torn tail: it ends the log, and the next writer cuts it off. Damage before the mark
        is a CorruptLog that names file and offset.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from goaly.base.atomic_files import put_file
from goaly.base.errors import CorruptLog
from goaly.base.safetensors_file import Buffer

FORMAT = 2
"""The version of the frames and of goaly's records in them."""
HEADER = struct.Struct("<10sHIQQ")
"""Magic, format, number, size of the segment before, checksum."""
FRAME = struct.Struct("<QQ")
PLACE = struct.Struct("<QQQ")
MAGIC = b"goaly log\n"


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A place in the log."""

    segment: int
    offset: int


START = Position(0, 0)
BEGINNING = "beginning"


@dataclass(frozen=True, slots=True)
class Frame:
    """A payload and its place."""

    start: Position
    end: Position
    payload: bytes


def durable_mark(folder: Path) -> Position:
    """The position up to which this log is known to be on disk; CorruptLog if its mark cannot be read."""
    path = folder / "durable"
    content = path.read_bytes() if path.exists() else b""
    slots = [content[: PLACE.size], content[PLACE.size : 2 * PLACE.size]]
    places = [Position(*PLACE.unpack(slot)[:2]) for slot in slots if len(slot) == PLACE.size]
    valid = [place for place, slot in zip(places, slots, strict=False) if slot_of(place) == slot]
    if not valid:
        raise CorruptLog(f"{path}: {'is damaged' if path.exists() else 'is missing'}")
    # the mark of a host that died may be older than the log's beginning
    return max(*valid, Position(_beginning(folder), 0))


def segment_starts(folder: Path) -> list[Position]:
    """The start of each segment of a log, in order."""
    numbers = (int(path.stem) for path in segments(folder))
    return [Position(number, 0) for number in numbers if number >= _beginning(folder)]


def begin_at(folder: Path, segment: int) -> None:
    """Let the log begin with this segment, and delete those before it."""
    if segment > _beginning(folder):
        put_file(folder / BEGINNING, slot_of(Position(segment, 0)))
    for old in segments(folder):
        if int(old.stem) < segment:
            old.unlink()


def _beginning(folder: Path) -> int:
    """The number of a log's first segment."""
    path = folder / BEGINNING
    if not path.exists():
        return 0
    slot = path.read_bytes()
    place = Position(*PLACE.unpack(slot)[:2]) if len(slot) == PLACE.size else START
    if slot_of(place) != slot:
        raise CorruptLog(f"{path}: is damaged")
    return place.segment


def frames(folder: Path, after: Position | None = None) -> Iterator[Frame]:
    """The frames of a log after this position, the start of a segment or the end of a frame (journal-2); None is
    the log's beginning."""
    mark, end = durable_mark(folder), after or Position(_beginning(folder), 0)
    previous: int | None = None
    while (path := segment_file(folder, end.segment)).exists():
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
        if is_cut or not segment_file(folder, end.segment + 1).exists():
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
    if header != segment_header(place.segment, HEADER.unpack(header)[3], version):
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
        if start != frame_header(Position(place.segment, offset), [payload]):
            raise _Damage("a frame with a wrong checksum")
        yield Frame(Position(place.segment, offset), Position(place.segment, end), payload)
        offset = end


def segment_header(number: int, previous: int, version: int = FORMAT) -> bytes:
    fields = MAGIC, version, number, previous
    return HEADER.pack(*fields, xxh3_64_intdigest(HEADER.pack(*fields, 0)))


def frame_header(place: Position, payload: Sequence[Buffer]) -> bytes:
    length = sum(map(len, payload))
    checksum = xxh3_64(seed=xxh3_64_intdigest(PLACE.pack(place.segment, place.offset, length)))
    for part in payload:
        checksum.update(part)
    return FRAME.pack(length, checksum.intdigest())


def slot_of(place: Position) -> bytes:
    return PLACE.pack(place.segment, place.offset, xxh3_64_intdigest(struct.pack("<QQ", place.segment, place.offset)))


def segment_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.log"


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]" * 6 + ".log"))

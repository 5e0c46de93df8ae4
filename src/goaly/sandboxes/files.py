"""Files on their way into a sandbox and out of it.

A process inside the sandbox, with the sandbox's user and root, reads and writes them (`native/files.c`): no link or
path of the sandbox means anything on the host. What comes out is checked again before it is written to the host.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from goaly.sandboxes.contract import Entry

HEAD = struct.Struct("<cIIQ")
KINDS: dict[bytes, Literal["file", "folder", "link"]] = {b"f": "file", b"d": "folder", b"l": "link"}
LETTERS = {kind: letter for letter, kind in KINDS.items()}


def stream_of(entries: Sequence[Entry]) -> Iterator[bytes]:
    """The bytes that `native/files.c` reads."""
    for entry in entries:
        path = entry.path.encode(errors="surrogateescape")
        if not clean(entry.path):
            raise ValueError(f"{entry.path!r} must be a relative path without '..'")
        yield HEAD.pack(LETTERS[entry.kind], entry.mode, len(path), len(entry.contents)) + path
        yield entry.contents


def entries_of(stream: bytes) -> list[Entry]:
    """The entries of a stream that `native/files.c` wrote. ValueError if it ends early or is malformed."""
    reader = EntryReader()
    entries = reader.feed(stream)
    reader.end()
    return entries


class EntryReader:
    """Reads the entries of a stream as its parts come."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0
        self._needed = HEAD.size

    def feed(self, part: bytes) -> list[Entry]:
        """The entries that are complete with this part. ValueError if the stream is malformed."""
        self._held.append(part)
        self._size += len(part)
        if self._size < self._needed:
            return []
        stream, at, entries = b"".join(self._held), 0, []
        while True:
            self._needed = HEAD.size
            if len(stream) - at < self._needed:
                break
            kind, mode, path_bytes, content_bytes = HEAD.unpack_from(stream, at)
            if kind not in KINDS:
                raise ValueError("the stream of files is malformed")
            path_at, contents_at = at + HEAD.size, at + HEAD.size + path_bytes
            self._needed += path_bytes + content_bytes
            if len(stream) - at < self._needed:
                break
            at += self._needed
            path = stream[path_at:contents_at].decode(errors="surrogateescape")
            entries.append(Entry(path=path, kind=KINDS[kind], mode=mode, contents=stream[contents_at:at]))
        self._held, self._size = [stream[at:]], len(stream) - at
        return entries

    def end(self) -> None:
        """ValueError if the stream ended early."""
        if self._size:
            raise ValueError("the stream of files ends in the middle of an entry")


def clean(path: str) -> bool:
    """Whether a path stays below the folder that it is relative to."""
    return not path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def folder_entries(folder: Path) -> list[Entry]:
    """Everything below a folder of the host; links as links."""
    entries = []
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files) + folders:
            path = Path(at, name)
            relative = str(path.relative_to(folder))
            mode = path.lstat().st_mode & 0o777
            if path.is_symlink():
                entries.append(Entry(path=relative, kind="link", contents=os.fsencode(os.readlink(path))))
            elif path.is_dir():
                entries.append(Entry(path=relative, kind="folder", mode=mode))
            elif path.is_file():
                entries.append(Entry(path=relative, contents=path.read_bytes(), mode=mode))
    return entries


def write_folder(entries: Sequence[Entry], folder: Path) -> list[str]:
    """Write entries of a sandbox below a folder of the host; the paths that were left out.

    Links are left out, and so is every path that would lead out of the folder: a later reader might follow them.
    """
    left_out = []
    for entry in entries:
        path = folder / entry.path
        if not clean(entry.path) or entry.kind == "link":
            left_out.append(entry.path)
        elif entry.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(entry.contents)
            path.chmod(entry.mode & 0o755)
    return left_out

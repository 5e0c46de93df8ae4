"""The clean files of a task's workdir, kept on this side: the base of an agent's patch and of its grading."""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from goaly.grading.ignored_files import IgnoreRules
from goaly.sandboxes.contract import Entry

IN_MEMORY: Final = 1 << 20
LINK: Final = 0o120000
EXECUTABLE: Final = 0o100755
PLAIN: Final = 0o100644
NEVER_IN_A_PATCH: Final = re.compile(
    r"(^|/)(\.git|__pycache__|\.pytest_cache|\.hypothesis)(/|$)|\.(py[cod]|so)$", re.IGNORECASE
)
"""Git's own files, compiled code, and what pytest leaves behind."""


@dataclass(frozen=True, slots=True)
class File:
    """A file with git's mode, or a link, whose contents are its target."""

    mode: int
    contents: bytes

    def entry(self, path: str) -> Entry:
        """As it goes into a sandbox."""
        kind = "link" if self.mode == LINK else "file"
        return Entry(path=path, kind=kind, contents=self.contents, mode=self.mode & 0o777)


def file_of(entry: Entry) -> File:
    """An entry that is no folder, with git's mode."""
    mode = LINK if entry.kind == "link" else EXECUTABLE if entry.mode & 0o100 else PLAIN
    return File(mode, entry.contents)


@dataclass(frozen=True, slots=True)
class _Place:
    mode: int
    digest: bytes
    start: int
    length: int


class FileTree(Mapping[str, File]):
    """Files by path. Contents are in memory while they are small, and then in a file without a name."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._contents = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        self._reading = threading.Lock()  # patches of several attempts are made at the same time
        self._places: dict[str, _Place] = {}
        self.bytes = 0
        for entry in entries:
            if entry.kind == "folder" or NEVER_IN_A_PATCH.search(entry.path):
                continue
            file = file_of(entry)
            self._contents.write(file.contents)
            self._places[entry.path] = _Place(file.mode, _digest(file), self.bytes, len(file.contents))
            self.bytes += len(file.contents)
        names = [path for path in self._places if path.rpartition("/")[2] == ".gitignore"]
        self._ignored = IgnoreRules({path: self[path].contents for path in names})

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, path: str) -> File:
        place = self._places[path]
        with self._reading:
            self._contents.seek(place.start)
            return File(place.mode, self._contents.read(place.length))

    def __len__(self) -> int:
        return len(self._places)

    def changes(self, entries: Sequence[Entry]) -> dict[str, File | None]:
        """The changes in an agent's files: new and changed files by path, None for a deleted one.

        New files that the clean `.gitignore` files ignore are left out, as `git add` leaves them out."""
        found: dict[str, File | None] = {}
        seen = set()
        for entry in entries:
            if entry.kind == "folder" or NEVER_IN_A_PATCH.search(entry.path):
                continue
            seen.add(entry.path)
            file, place = file_of(entry), self._places.get(entry.path)
            if place is None and self._ignored(entry.path):
                continue
            if place is None or place.mode != file.mode or place.digest != _digest(file):
                found[entry.path] = file
        found.update((path, None) for path in self._places if path not in seen)
        return found

    def close(self) -> None:
        """Free the contents."""
        self._contents.close()


def _digest(file: File) -> bytes:
    return hashlib.blake2b(file.contents, digest_size=20).digest()

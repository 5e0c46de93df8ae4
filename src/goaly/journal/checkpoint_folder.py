"""Folders of checkpoints, each of which appears whole or not at all.

    checkpoints/000120/manifest.json   the step, facts of the writer, and size and XXH3 checksum of every other file
    checkpoints/000120/...             the files of its writers
    checkpoints/writing-000130/        is being written, or was when its writer died

`newest` gives only a checkpoint whose files have the sizes and checksums of its manifest. `prune` removes only what is
older than the newest `keep` sound checkpoints. It reads each of them once: those whose files have the sizes and times
of then are still sound.

    journal-4: A folder named by its step was written whole and synced. It never changes.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from goaly.base.atomic_files import remove, sync

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
WRITING = "writing-"
CHUNK_BYTES = 1 << 20

_Files = Mapping[Path, tuple[int, int, int]]
"""The inode, size and time of change of files."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    step: int
    facts: Mapping[str, Any]
    """Notes of its writer beside the files."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._verified: dict[Path, _Files] = {}
        """The files of each checkpoint that was found sound, or was made, by this process."""

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a new checkpoint; leftovers of interrupted ones are removed."""
        for leftover in self._folder.glob(f"{WRITING}*"):
            shutil.rmtree(leftover)
        writing = self._folder / f"{WRITING}{step:06d}"
        writing.mkdir(parents=True)
        return writing

    def commit(self, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Make the checkpoint of `begin` appear, with these facts (journal-4)."""
        writing, folder = self._folder / f"{WRITING}{step:06d}", self._folder / f"{step:06d}"
        files = {str(path.relative_to(writing)): _file_entry(path, sync=True) for path in _files(writing)}
        content = {"format": FORMAT, "step": step, "facts": facts, "files": files}
        manifest = writing / MANIFEST
        manifest.write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")
        for path in (manifest, *sorted({path.parent for path in _files(writing)}, reverse=True)):
            sync(path)
        if folder.exists():
            remove(folder)  # it is damaged, or there would be no new one
        os.rename(writing, folder)
        self._verified[folder] = _stats(folder)
        sync(self._folder)
        return Checkpoint(folder, step, facts)

    def newest(self, *, at_most: int | None = None) -> Checkpoint | None:
        """The newest sound checkpoint, or that of at most this step. Others are skipped with a warning."""
        return self._first_sound(each for each in self._folders() if at_most is None or int(each.name) <= at_most)

    def oldest(self, *, at_least: int) -> Checkpoint | None:
        """The oldest sound checkpoint of at least this step. Others are skipped with a warning."""
        return self._first_sound(each for each in reversed(self._folders()) if int(each.name) >= at_least)

    def prune(self, keep: int) -> int | None:
        """Remove the checkpoints that are older than the newest `keep` sound ones; the step of the oldest of
        these, or None if there are fewer."""
        sound = (folder for folder in self._folders() if self._is_unchanged(folder) or self._read(folder))
        last = next(islice(sound, keep - 1, None), None)
        if last is None:
            return None
        for folder in self._folders():
            if int(folder.name) < int(last.name):
                self._verified.pop(folder, None)
                remove(folder)
        return int(last.name)

    def _first_sound(self, folders: Iterable[Path]) -> Checkpoint | None:
        return next(filter(None, map(self._read, folders)), None)

    def _is_unchanged(self, folder: Path) -> bool:
        """Whether the folder was sound, and its files have not changed since."""
        return self._verified.get(folder) == _stats(folder)

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            files = _stats(folder)
            found = read_checkpoint(folder)
        except (OSError, ValueError) as error:
            logger.warning("checkpoint %s is skipped: %s", folder, error)
            return None
        self._verified[folder] = files
        return found

    def _folders(self) -> list[Path]:
        found = [path for path in self._folder.glob("[0-9]*") if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name), reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in this folder; a ValueError or OSError names the file that is missing, changed or damaged."""
    content = json.loads((folder / MANIFEST).read_text())
    claimed = content.pop("checksum", None)
    if claimed != _checksum(content):
        raise ValueError(f"{MANIFEST} is damaged")
    if content["format"] != FORMAT:
        raise ValueError(f"{MANIFEST} has format {content['format']}, this goaly reads format {FORMAT}")
    for name, described in content["files"].items():
        found = _file_entry(folder / name)
        if found != described:
            raise ValueError(f"{name} is {found}, was written as {described}")
    return Checkpoint(folder, content["step"], content["facts"])


def _stats(folder: Path) -> _Files:
    """The files of a folder, with what changes when they do."""
    stats = {path: path.stat() for path in _files(folder)}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _file_entry(path: Path, *, sync: bool = False) -> dict[str, Any]:
    digest = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
        return {"bytes": file.tell(), "xxh3": digest.hexdigest()}


def _checksum(content: Mapping[str, Any]) -> str:
    return xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()

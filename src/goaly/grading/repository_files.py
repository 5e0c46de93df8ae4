"""The files of a repository on this side, from a folder or an archive, before they go into a sandbox."""

from __future__ import annotations

import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from goaly.grading.task import TaskProblem
from goaly.sandboxes.contract import Entry
from goaly.sandboxes.files import clean, folder_entries

MOST_FILES: Final = 200_000


def repository_files(path: Path, *, most_bytes: int) -> list[Entry]:
    """Everything of a folder or an archive (tar, zip); if an archive has one folder, what is in that folder.

    TaskProblem if a path or a link leads out of it, if it has a device, or if there is more than `most_bytes`.
    """
    try:
        if path.is_dir():
            return folder_entries(path)
        entries = []
        for entry in _zip(path, most_bytes) if zipfile.is_zipfile(path) else _tar(path, most_bytes):
            name = posixpath.normpath(entry.path)
            if not clean(entry.path):
                raise TaskProblem(f"{path}: {entry.path!r} leads out of the archive's folder")
            if name != ".":
                entries.append(replace(entry, path=name))
    except (OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise TaskProblem(f"{path}: cannot be read as a repository: {error}") from None
    entries = _without_top(entries)
    for entry in entries:
        if entry.kind == "link" and _leads_out(entry):
            raise TaskProblem(f"{path}: the link {entry.path!r} leads out of the archive's folder")
    return entries


def _without_top(entries: list[Entry]) -> list[Entry]:
    """Archives of a host of repositories have one folder with everything."""
    tops = {entry.path.partition("/")[0] for entry in entries}
    if len(tops) != 1 or not all("/" in entry.path or entry.kind == "folder" for entry in entries):
        return entries
    return [replace(entry, path=entry.path.partition("/")[2]) for entry in entries if "/" in entry.path]


def _leads_out(entry: Entry) -> bool:
    target = entry.contents.decode(errors="surrogateescape")
    return target.startswith("/") or not clean(
        posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), target))
    )


def _tar(path: Path, most_bytes: int) -> Iterator[Entry]:
    total = count = 0
    with tarfile.open(path) as archive:
        for member in archive:
            total, count = total + member.size, count + 1
            _check_size(path, total, count, most_bytes)
            if member.isdir():
                yield Entry(path=member.name, kind="folder", mode=member.mode & 0o777)
            elif member.issym():
                yield Entry(path=member.name, kind="link", contents=member.linkname.encode(errors="surrogateescape"))
            elif member.isfile() or member.islnk():
                reader = archive.extractfile(member)
                contents = reader.read(most_bytes) if reader else b""
                total += len(contents) if member.islnk() else 0
                yield Entry(path=member.name, contents=contents, mode=member.mode & 0o777)
            else:
                raise TaskProblem(f"{path}: {member.name!r} is a device or a pipe")


def _zip(path: Path, most_bytes: int) -> Iterator[Entry]:
    total = 0
    with zipfile.ZipFile(path) as archive:
        for count, info in enumerate(archive.infolist()):
            with archive.open(info) as reader:
                contents = reader.read(max(0, most_bytes - total) + 1)
            total += len(contents)
            _check_size(path, total, count, most_bytes)
            mode = info.external_attr >> 16
            if info.is_dir():
                yield Entry(path=info.filename.rstrip("/"), kind="folder", mode=0o755)
            elif stat.S_ISLNK(mode):
                yield Entry(path=info.filename, kind="link", contents=contents)
            else:
                yield Entry(path=info.filename, contents=contents, mode=0o755 if mode & 0o100 else 0o644)


def _check_size(path: Path, total: int, count: int, most_bytes: int) -> None:
    if total > most_bytes or count > MOST_FILES:
        raise TaskProblem(f"{path}: has more than {most_bytes >> 20} MiB or {MOST_FILES} files")

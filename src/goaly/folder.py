"""Files and folders that appear, are replaced and disappear whole, also if the process dies meanwhile."""

import ctypes
import os
import shutil
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's `renameat2`."""


def put_in_place(staging: Path, folder: Path) -> None:
    """Sync the written folder and put it in place; `staging` is then the old folder, if there was one."""
    for path in (*staging.iterdir(), staging):
        sync(path)
    if folder.exists():
        _exchange(staging, folder)
    else:
        staging.rename(folder)
    sync(folder.parent)


def put_file(path: Path, content: bytes) -> None:
    """Write a small file, in place of the old one if there is one; it is on disk on return."""
    staging = path.with_suffix(".new")
    staging.write_bytes(content)
    sync(staging)
    os.rename(staging, path)
    sync(path.parent)


def link_files(source: Path, folder: Path) -> None:
    """Put the files of one folder into another, new one: as hard links, or as copies if the file system has none."""

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copyfile(file, to)

    shutil.copytree(source, folder, copy_function=link)


def remove(folder: Path) -> None:
    """Remove a folder. It gets a hidden name first, so that a part of it never looks like the whole folder."""
    aside = _aside(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders atomically; without support of the file system, in three renames that keep the old folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None and swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    aside = _aside(other)
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def _aside(folder: Path) -> Path:
    """A hidden name beside the folder, which nothing has."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def sync(path: Path) -> None:
    """Return when this file, or the names in this folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files and folders that appear, are replaced and disappear whole, also if the process dies meanwhile; and files that
grow by whole lines."""

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from goaly.base.errors import ConfigError

PART_BYTES = 1 << 16

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
    try:
        staging.write_bytes(content)
        sync(staging)
    except OSError:  # such as a full disk
        staging.unlink(missing_ok=True)
        raise
    os.rename(staging, path)
    sync(path.parent)


@contextmanager
def writing(setting: str) -> Iterator[None]:
    """In this block an OSError, such as that of a full disk or of a read-only folder, becomes a ConfigError about this
    setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError([f"{setting}: cannot be written: {error}"]) from None


def open_lines(path: Path, *, cut: bool = True) -> int:
    """A descriptor that appends lines to this file. Half a line, which a crash or a full disk left at its end, is
    removed, or, with `cut=False`, ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        mend_last_line(file, cut=cut)
    except BaseException:
        os.close(file)
        raise
    return file


def append(file: int, content: bytes) -> None:
    """Append all of this content to a file of `open_lines`: in one write, unless the kernel cuts it."""
    while content:
        content = content[os.write(file, content) :]


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, without half a line that a crash left at its end, or that is being written."""
    return path.read_bytes().split(b"\n")[:-1]


def mend_last_line(file: int, *, cut: bool = True) -> None:
    """Remove the last line of a file of `open_lines` if it has no end, or end it. The file stays as it is while other
    processes have it open, because one of them may be writing this line."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            if cut:
                os.ftruncate(file, _end_of_lines(file, size))
            else:
                with suppress(OSError):  # the disk is still full
                    os.write(file, b"\n")
    except BlockingIOError:
        pass
    finally:
        fcntl.flock(file, fcntl.LOCK_SH)  # until it is closed


def _end_of_lines(file: int, size: int) -> int:
    """The place behind the last newline in these bytes of a file."""
    while size:
        start = max(0, size - PART_BYTES)
        if (newline := os.pread(file, size - start, start).rfind(b"\n")) >= 0:
            return start + newline + 1
        size = start
    return 0


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

"""Applies a patch to files that are known here, all of it or nothing.

The rules are those of `git apply`: the lines of a hunk must be there exactly, at the place that it names or the nearest
other one; a hunk of the first line begins the file, and one without lines after its changes ends it. Refused are paths
outside of the workdir, git's own files, compiled code, writing through links, and links that leave the workdir.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from goaly.grading.file_tree import EXECUTABLE, LINK, NEVER_IN_A_PATCH, PLAIN, File
from goaly.grading.patch_reader import FilePatch, PatchHunk, PatchProblem
from goaly.grading.patch_writer import lines_of
from goaly.sandboxes.files import clean


def apply_patch(files: Mapping[str, File], changes: Sequence[FilePatch]) -> dict[str, File | None]:
    """The files after the changes: new contents by path, None for a deleted file."""
    state = _Patched(files, changes)
    for change in changes:
        state.change(change)
    for path, file in state.made.items():
        if file is not None:
            state.check_place(path, file)
    return state.made


class _Patched:
    def __init__(self, files: Mapping[str, File], changes: Sequence[FilePatch]) -> None:
        self.files = files
        self.made: dict[str, File | None] = {}
        self.leaving = {change.old_path for change in changes if change.old_path != change.new_path}
        self.leaving -= {change.old_path for change in changes if change.copies}

    def get(self, path: str) -> File | None:
        return self.made[path] if path in self.made else self.files.get(path)

    def change(self, change: FilePatch) -> None:
        old_path, new_path = change.old_path, change.new_path
        for path in (old_path, new_path):
            if path is not None:
                _check_path(path)
        moves = old_path is not None and new_path is not None and old_path != new_path
        old = self.old_file(old_path, moves) if old_path is not None else File(PLAIN, b"")
        contents = _contents(old_path or new_path or "", old.contents, change)
        if new_path is None:
            if contents:
                raise PatchProblem(f"{old_path}: the patch deletes it, but not all of its lines")
        elif moves or old_path is None:
            there = self.made.get(new_path) if new_path in self.leaving or new_path in self.made else self.get(new_path)
            if there is not None:
                raise PatchProblem(f"{new_path}: the patch makes it, but it is there already")
        if (
            old_path is not None
            and old_path != new_path
            and not change.copies
            and not (moves and old_path in self.made)
        ):
            self.made[old_path] = None
        if new_path is not None:
            self.made[new_path] = File(_mode(new_path, old.mode, change.mode), contents)

    def old_file(self, path: str, moves: bool) -> File:
        """Renames and copies are of the file before the patch, in whatever order its parts are."""
        file = self.files.get(path) if moves and path in self.files else self.get(path)
        if file is None:
            raise PatchProblem(f"{path}: the patch changes it, but it is not there")
        return file

    def check_place(self, path: str, file: File) -> None:
        parts = path.split("/")
        for n in range(1, len(parts)):
            above = self.get("/".join(parts[:n]))
            if above is not None:
                kind = "link" if above.mode == LINK else "file"
                raise PatchProblem(f"{path}: {'/'.join(parts[:n])} is a {kind}, not a folder")
        if file.mode == LINK:
            target = file.contents.decode(errors="surrogateescape")
            leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if target.startswith("/") or leads_to.split("/")[0] == ".." or "\0" in target or not target:
                raise PatchProblem(f"{path}: a link to {target!r}, which is outside of the workdir")


def _check_path(path: str) -> None:
    if not path or not clean(path) or any(part in ("", ".") for part in path.split("/")):
        raise PatchProblem(f"{path!r}: must be a path below the workdir")
    if NEVER_IN_A_PATCH.search(path):
        raise PatchProblem(f"{path}: files of git and compiled code may not be in a patch")


def _mode(path: str, old: int, new: int | None) -> int:
    if new is None or new == old:
        return old
    if new not in (PLAIN, EXECUTABLE, LINK):
        raise PatchProblem(f"{path}: mode {new:o}: must be {PLAIN:o}, {EXECUTABLE:o} or {LINK:o}")
    return new


def _contents(path: str, old: bytes, change: FilePatch) -> bytes:
    if change.binary:
        kind, data = change.binary
        return data if kind == "literal" else _delta(path, old, data)
    if not change.hunks:
        return b"" if change.new_path is None else old
    lines, at, moved = lines_of(old), 0, 0
    out: list[bytes] = []
    for hunk in change.hunks:
        place = _place(lines, hunk, at, moved)
        if place is None:
            raise PatchProblem(f"{path}: the lines of the hunk at line {hunk.start} are not there")
        out += lines[at:place] + hunk.new
        moved, at = place - _named_place(hunk), place + len(hunk.old)
    return b"".join(out + lines[at:])


def _named_place(hunk: PatchHunk) -> int:
    return hunk.start - 1 if hunk.old else hunk.start


def _place(lines: list[bytes], hunk: PatchHunk, first: int, moved: int) -> int | None:
    """The index of the hunk's first line: the nearest to the named one at which all of its old lines are."""
    last, length = len(lines) - len(hunk.old), len(hunk.old)
    if hunk.start <= 1:
        last = min(last, 0)
    if not hunk.ends_with_context:
        first = max(first, len(lines) - length)
    named = _named_place(hunk) + moved
    for place in sorted(range(first, last + 1), key=lambda one: abs(one - named)):
        if lines[place : place + length] == hunk.old:
            return place
    return None


def _delta(path: str, old: bytes, delta: bytes) -> bytes:
    """The new contents, by git's binary delta to the old ones."""
    try:
        return _undone(old, delta)
    except (IndexError, ValueError) as error:
        raise PatchProblem(f"{path}: its binary change does not fit: {error}") from None


def _undone(old: bytes, delta: bytes) -> bytes:
    at, sizes = 0, []
    for _ in range(2):
        size = shift = 0
        while True:
            byte, at = delta[at], at + 1
            size, shift = size | (byte & 127) << shift, shift + 7
            if not byte & 128:
                break
        sizes.append(size)
    if sizes[0] != len(old):
        raise ValueError("the old file has another size")
    out = bytearray()
    while at < len(delta):
        op, at = delta[at], at + 1
        if op & 128:
            numbers = [0, 0]
            for bit in range(7):
                if op & 1 << bit:
                    numbers[bit > 3] |= delta[at] << 8 * (bit if bit < 4 else bit - 4)
                    at += 1
            start, length = numbers[0], numbers[1] or 0x10000
            if start + length > len(old) or len(out) + length > sizes[1]:
                raise ValueError("it copies bytes that are not there")
            out += old[start : start + length]
        else:
            if not op or at + op > len(delta):
                raise ValueError("it ends early")
            out += delta[at : at + op]
            at += op
    if len(out) != sizes[1]:
        raise ValueError("the new file has another size")
    return bytes(out)

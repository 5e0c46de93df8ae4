"""The patch that takes another one back: the solution of a task whose bug came by a patch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from goaly.grading.patch_reader import FilePatch, PatchHunk, read_patch


def reversed_patch(patch: str, *, most_bytes: int) -> str:
    """The patch that takes this one back; a ValueError if it is malformed, or has binary files or other modes."""
    changes = read_patch(patch, most_bytes=most_bytes)
    lines = (line for change in reversed(changes) for line in _file_lines(change))
    return b"".join(lines).decode(errors="surrogateescape")


def _file_lines(change: FilePatch) -> Iterator[bytes]:
    was, now = change.new_path, change.old_path
    if change.binary or change.copies or (was and now and change.mode is not None):
        raise ValueError(f"{was or now}: a binary file, a copy or a change of the mode cannot be taken back")
    yield f"diff --git a/{was or now} b/{now or was}\n".encode(errors="surrogateescape")
    if was is None:
        yield b"new file mode 100644\n"
    elif now is None:
        yield f"deleted file mode {change.mode or 0o100644:o}\n".encode()
    elif was != now:
        yield f"rename from {was}\nrename to {now}\n".encode(errors="surrogateescape")
    if change.hunks:
        yield f"--- {f'a/{was}' if was else '/dev/null'}\t\n".encode(errors="surrogateescape")
        yield f"+++ {f'b/{now}' if now else '/dev/null'}\t\n".encode(errors="surrogateescape")
    moved = 0
    for hunk in change.hunks:
        yield from _hunk_lines(hunk, moved)
        moved += len(hunk.new) - len(hunk.old)


def _hunk_lines(hunk: PatchHunk, moved: int) -> Iterator[bytes]:
    """The lines of the hunk that puts the old lines back, between those that both sides share."""
    there, back = hunk.new, hunk.old
    start = hunk.start - 1 if back else hunk.start
    yield f"@@ -{_range(start + moved, len(there))} +{_range(start, len(back))} @@\n".encode()
    before = _shared(there, back)
    after = _shared(there[before:][::-1], back[before:][::-1])
    for mark, lines in (
        (b" ", there[:before]),
        (b"-", there[before : len(there) - after]),
        (b"+", back[before : len(back) - after]),
        (b" ", there[len(there) - after :]),
    ):
        for line in lines:
            yield mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _range(start: int, length: int) -> str:
    return f"{start + 1 if length else start},{length}"


def _shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """The number of lines at the beginning that are alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

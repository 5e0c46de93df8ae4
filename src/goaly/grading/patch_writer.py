"""Writes a patch in the form of `git diff --binary` from the old and the new contents of files.

No git runs on anything that an agent wrote: its settings, hooks, attributes and a `git` of its own mean nothing here.
"""

from __future__ import annotations

import zlib
from base64 import b85encode
from collections.abc import Mapping
from difflib import SequenceMatcher
from hashlib import sha1
from typing import Final

from goaly.grading.file_tree import LINK, File

CONTEXT: Final = 3
MOST_COMPARED_LINES: Final = 20_000
"""Longer changes are written as one: all old lines out, all new lines in."""
ESCAPES: Final = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
LETTERS: Final = {code: letter for letter, code in ESCAPES.items()}


def patch_of(before: Mapping[str, File], changes: Mapping[str, File | None]) -> str:
    """The patch that makes these changes: new contents by path, None for a deleted file."""
    return "".join(_file_patch(path, before.get(path), changes[path]) for path in sorted(changes))


def _file_patch(path: str, old: File | None, new: File | None) -> str:
    if old and new and (old.mode == LINK) != (new.mode == LINK):
        return _file_patch(path, old, None) + _file_patch(path, None, new)
    a, b = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    text = f"diff --git {a} {b}\n"
    if old is None:
        assert new is not None
        text += f"new file mode {new.mode:o}\n"
    elif new is None:
        text += f"deleted file mode {old.mode:o}\n"
    elif old.mode != new.mode:
        text += f"old mode {old.mode:o}\nnew mode {new.mode:o}\n"
    was, now = old.contents if old else b"", new.contents if new else b""
    if was == now:
        return text + ("" if old and new else f"index {_blob(old)}..{_blob(new)}\n")
    text += f"index {_blob(old)}..{_blob(new)}" + (f" {new.mode:o}\n" if old and new and old.mode == new.mode else "\n")
    if not (_is_text(was) and _is_text(now)):
        return text + "GIT binary patch\n" + _literal(now) + _literal(was)
    ends = [f"{a}\t" if " " in a else a, f"{b}\t" if " " in b else b]
    text += f"--- {ends[0] if old else '/dev/null'}\n+++ {ends[1] if new else '/dev/null'}\n"
    return text + _hunks(was, now).decode()


def _blob(file: File | None) -> str:
    """The name that git has for the contents."""
    if file is None:
        return "0" * 40
    return sha1(b"blob %d\0" % len(file.contents) + file.contents, usedforsecurity=False).hexdigest()


def _is_text(contents: bytes) -> bool:
    if b"\0" in contents:
        return False
    try:
        contents.decode()
    except UnicodeDecodeError:
        return False
    return True


def _literal(contents: bytes) -> str:
    packed, lines = zlib.compress(contents), [f"literal {len(contents)}"]
    for start in range(0, len(packed), 52):
        part = packed[start : start + 52]
        length = chr(len(part) + (64 if len(part) <= 26 else 70))
        padded = part + b"\0" * (-len(part) % 4)
        lines.append(length + b85encode(padded).decode())
    return "\n".join(lines) + "\n\n"


def lines_of(contents: bytes) -> list[bytes]:
    """With their ends; only a line feed ends one."""
    lines = contents.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _hunks(was: bytes, now: bytes) -> bytes:
    old, new = lines_of(was), lines_of(now)
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    a, b = old[start : len(old) - end], new[start : len(new) - end]
    if len(a) + len(b) > MOST_COMPARED_LINES:
        groups = [[("replace", 0, len(a), 0, len(b))]]
    else:
        groups = list(SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(CONTEXT))
    out = []
    for group in groups:
        i, i_end, j, j_end = group[0][1], group[-1][2], group[0][3], group[-1][4]
        out.append(b"@@ -%s +%s @@\n" % (_range(start + i, i_end - i), _range(start + j, j_end - j)))
        for kind, i, i_end, j, j_end in group:
            if kind == "equal":
                out += [_marked(b" ", line) for line in a[i:i_end]]
            else:
                out += [_marked(b"-", line) for line in a[i:i_end]] + [_marked(b"+", line) for line in b[j:j_end]]
    return b"".join(out)


def _range(start: int, length: int) -> bytes:
    return b"%d,%d" % (start + 1 if length else start, length)


def _marked(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _quoted(name: str) -> str:
    data = name.encode(errors="surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in data):
        return name
    out = ""
    for byte in data:
        plain = 32 <= byte < 127 and byte not in LETTERS
        out += chr(byte) if plain else f"\\{LETTERS[byte]}" if byte in LETTERS else f"\\{byte:03o}"
    return f'"{out}"'

"""Reads a patch: git's form with renames, modes and binary files, or a plain unified diff."""

from __future__ import annotations

import binascii
import re
import zlib
from base64 import b85decode
from dataclasses import dataclass, field

from goaly.grading.patch_writer import ESCAPES, lines_of

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchProblem(ValueError):
    """A patch that is malformed, not allowed, or does not fit; the message says which of its files and why."""


@dataclass(slots=True)
class PatchHunk:
    """One place of a file: the lines that are there, and the lines that come."""

    start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)
    ends_with_context: bool = False


@dataclass(slots=True)
class FilePatch:
    """A patch's change of one file. A path is None where the file is not there before, or not afterwards."""

    old_path: str | None
    new_path: str | None
    mode: int | None = None
    copies: bool = False
    """The old file stays."""
    hunks: list[PatchHunk] = field(default_factory=list)
    binary: tuple[str, bytes] | None = None
    """`literal` with the new contents, or `delta` with git's recipe for them."""


def read_patch(text: str, *, most_bytes: int = 1 << 20) -> list[FilePatch]:
    """The changes of a patch; PatchProblem if it is malformed or has more bytes, packed or unpacked."""
    if len(text) > most_bytes or len(data := text.encode(errors="surrogateescape")) > most_bytes:
        raise PatchProblem(f"the patch has {len(text)} characters; at most {most_bytes} bytes are allowed")
    changes = _PatchReader(data, most_bytes).changes()
    if data.strip() and not changes:
        raise PatchProblem("the patch has no change that could be read: must be in the form of `git diff`")
    return changes


class _PatchReader:
    def __init__(self, data: bytes, most_bytes: int) -> None:
        self._lines = lines_of(data)
        self._at = 0
        self._most = most_bytes

    def _peek(self) -> bytes:
        return self._lines[self._at] if self._at < len(self._lines) else b""

    def _next(self) -> bytes:
        line = self._peek()
        self._at += 1
        return line

    def _bad(self, reason: str) -> PatchProblem:
        return PatchProblem(f"line {self._at + 1} of the patch: {reason}")

    def changes(self) -> list[FilePatch]:
        found = []
        while self._at < len(self._lines):
            line = self._peek()
            if line.startswith(b"diff --git "):
                found.append(self._git_change())
            elif self._is_at_names():
                found.append(self._plain_change())
            elif HUNK.match(line):
                raise self._bad("a hunk without the name of its file")
            else:
                self._at += 1  # a comment between files, such as a commit's message
        return found

    def _is_at_names(self) -> bool:
        after = self._lines[self._at + 1] if self._at + 1 < len(self._lines) else b""
        return self._peek().startswith(b"--- ") and after.startswith(b"+++ ")

    def _git_change(self) -> FilePatch:
        names = self._next()[len(b"diff --git ") :].rstrip(b"\r\n")
        old, new = self._both_names(names)
        change = FilePatch(old, new)
        is_new = is_deleted = False
        while line := self._peek():
            key, _, value = line.rstrip(b"\r\n").partition(b" ")
            words = line.rstrip(b"\r\n")
            if words.startswith((b"new file mode ", b"new mode ")):
                is_new = is_new or (key == b"new" and words.startswith(b"new file"))
                change.mode = self._mode(words.rpartition(b" ")[2])
            elif words.startswith(b"deleted file mode "):
                is_deleted = True
            elif words.startswith((b"rename from ", b"copy from ")):
                change.old_path, change.copies = self._name(value[5:]), key == b"copy"
            elif words.startswith((b"rename to ", b"copy to ")):
                change.new_path = self._name(value[3:])
            elif not words.startswith((b"old mode ", b"index ", b"similarity index ", b"dissimilarity index ")):
                break
            self._at += 1
        if self._is_at_names():
            named = self._plain_change()
            change.hunks = named.hunks
            change.old_path = change.old_path or named.old_path
            change.new_path = change.new_path or named.new_path
        elif self._peek().startswith(b"GIT binary patch"):
            self._at += 1
            change.binary = self._binary()
            if self._peek().startswith((b"literal ", b"delta ")):
                self._binary()  # the way back
        elif self._peek().startswith(b"Binary files "):
            raise self._bad("a binary file without its contents; make the patch with `git diff --binary`")
        if change.old_path is None and change.new_path is None:
            raise self._bad("the names of the file cannot be told apart")
        change.old_path = None if is_new else change.old_path
        change.new_path = None if is_deleted else change.new_path
        return change

    def _plain_change(self) -> FilePatch:
        old = self._side(self._next()[4:])
        new = self._side(self._next()[4:])
        if old is None and new is None:
            raise self._bad("a file that is neither there before nor afterwards")
        change = FilePatch(old, new)
        while match := HUNK.match(self._peek()):
            change.hunks.append(self._hunk(match))
        if not change.hunks:
            raise self._bad("a file without a hunk")
        return change

    def _hunk(self, match: re.Match[bytes]) -> PatchHunk:
        self._at += 1
        start, old_left, _, new_left = (int(one) if one is not None else 1 for one in match.groups())
        hunk = PatchHunk(start)
        while old_left or new_left:
            line = self._next()
            mark, rest = (line[:1], line[1:]) if line not in (b"\n", b"\r\n") else (b" ", line)
            if mark not in (b" ", b"-", b"+") or not line:
                raise self._bad("the hunk ends before it has as many lines as it says")
            if self._peek().startswith(b"\\ "):
                self._at += 1
                rest = rest[:-1]
            elif not rest.endswith(b"\n"):
                rest += b"\n"  # the patch's own last line lacks its end
            if mark != b"+":
                hunk.old.append(rest)
                old_left -= 1
            if mark != b"-":
                hunk.new.append(rest)
                new_left -= 1
            hunk.ends_with_context = mark == b" "
            if old_left < 0 or new_left < 0:
                raise self._bad("the hunk has more lines than it says")
        return hunk

    def _binary(self) -> tuple[str, bytes]:
        kind, _, size = self._next().decode(errors="replace").strip().partition(" ")
        if kind not in ("literal", "delta") or not size.isdigit():
            raise self._bad("must be `literal SIZE` or `delta SIZE`")
        packed = b""
        while (line := self._next().rstrip(b"\r\n")) != b"":
            length = line[0] - (64 if line[0] <= 90 else 70)
            try:
                packed += b85decode(line[1:])[:length]
            except (ValueError, binascii.Error):
                raise self._bad("not git's base 85") from None
        unpacker = zlib.decompressobj()
        try:
            contents = unpacker.decompress(packed, min(int(size) + 1, self._most + 1))
        except zlib.error as error:
            raise self._bad(f"a binary file that does not unpack: {error}") from None
        if len(contents) != int(size):
            raise self._bad(f"a binary file of another size than {size}, or of more than {self._most} bytes")
        return kind, contents

    def _mode(self, text: bytes) -> int:
        try:
            return int(text, 8)
        except ValueError:
            raise self._bad(f"{text.decode(errors='replace')!r} is no mode of a file") from None

    def _both_names(self, names: bytes) -> tuple[str | None, str | None]:
        """The two names of a `diff --git` line; None if only later lines can tell."""
        if names.startswith(b'"') or names.endswith(b'"'):
            found = re.fullmatch(rb'("(?:[^"\\]|\\.)*"|[^"]*?) ("(?:[^"\\]|\\.)*"|[^"]*)', names)
            return (self._side(found[1]), self._side(found[2])) if found else (None, None)
        middle = len(names) // 2
        if names[middle : middle + 1] == b" " and names[:middle][2:] == names[middle + 1 :][2:]:
            return self._side(names[:middle]), self._side(names[middle + 1 :])
        return None, None

    def _side(self, text: bytes) -> str | None:
        """A name with its `a/` or `b/`; None for /dev/null."""
        text = text.rstrip(b"\r\n")
        name = self._name(text if text.startswith(b'"') else text.partition(b"\t")[0])
        if name == "/dev/null":
            return None
        return name[2:] if name[:2] in ("a/", "b/") else name

    def _name(self, text: bytes) -> str:
        if not text.startswith(b'"'):
            return text.decode(errors="surrogateescape")
        inside = text[1 : text.rfind(b'"')].decode("latin-1")
        plain = re.sub(r"\\([0-7]{1,3}|.)", _unescaped, inside)
        return plain.encode("latin-1").decode(errors="surrogateescape")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code, 8) & 255) if code[0].isdigit() else chr(ESCAPES.get(code, ord(code)))

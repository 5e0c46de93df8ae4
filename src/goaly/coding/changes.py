"""Which files of the workdir each turn of an agent changed, and how many lines came and went.

The files of a small workdir are read after each command, which takes less time than to start a program. Of a large one
the sizes and times of files are listed, and those that differ are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from goaly.grading.file_tree import File, FileTree
from goaly.grading.patch_writer import patch_of
from goaly.sandboxes.contract import Entry
from goaly.sandboxes.sandbox import Sandbox

SMALL_BYTES: Final = 1 << 18
MOST_READ_FILES, MOST_READ_BYTES = 64, 1 << 20
"""Of a large workdir: files that one turn changed, and bytes of each. Of others only the path is known."""
LISTING: Final = (
    *("find", ".", "(", "-name", ".git", "-o", "-name", "__pycache__", ")", "-prune", "-o"),
    *("(", "-type", "f", "-o", "-type", "l", ")", "-printf", r"%C@ %s %P\0"),
)
MOST_LISTED_BYTES: Final = 1 << 24

State = Mapping[str, File | None]
"""The files that differ from the clean ones, by path; None for a deleted one."""


class FileChanges:
    """The changes of one sandbox's workdir, from turn to turn."""

    def __init__(self, sandbox: Sandbox, workdir: str, clean: FileTree) -> None:
        """`clean` are the files with which the sandbox began."""
        self._sandbox = sandbox
        self._workdir = workdir
        self._clean = clean
        self._last: State = {}
        self._stamps: dict[str, str] | None = None
        """Size and time of each file of a large workdir."""

    def move_to(self, sandbox: Sandbox) -> None:
        """Look into another sandbox, with the same files, from now on."""
        self._sandbox = sandbox

    async def begin(self) -> None:
        """Look at the files before the agent changes any."""
        try:
            await self._sandbox.download(self._workdir, most_bytes=SMALL_BYTES)
        except ValueError:
            self._stamps = await self._listed()

    async def since_last(self) -> dict[str, str]:
        """The paths that changed since the last look, each with its lines, such as `+3 -1`."""
        now, unread = await (self._small() if self._stamps is None else self._large(self._stamps))
        before, self._last = self._last, now
        changed = [path for path in sorted({**before, **now}) if self._of(before, path) != self._of(now, path)]
        lines = {path: _lines(path, self._of(before, path), self._of(now, path)) for path in changed}
        return lines | dict.fromkeys(unread, "changed")

    def _of(self, state: State, path: str) -> File | None:
        return state[path] if path in state else self._clean.get(path)

    async def _small(self) -> tuple[State, Sequence[str]]:
        try:
            return self._clean.changes(await self._sandbox.download(self._workdir, most_bytes=SMALL_BYTES)), ()
        except (OSError, ValueError):  # the agent has removed it, or has made it large
            self._stamps = await self._listed()
            return self._last, ()

    async def _large(self, before: dict[str, str]) -> tuple[State, Sequence[str]]:
        self._stamps = stamps = await self._listed()
        touched = sorted(path for path in {**before, **stamps} if before.get(path) != stamps.get(path))
        now, unread = dict(self._last), []
        for place, path in enumerate(touched):
            if path not in stamps:
                now[path] = None
                continue
            entries = await self._read(path) if place < MOST_READ_FILES else []
            found = self._clean.changes(entries)
            if not entries:
                unread.append(path)
            elif path in found:
                now[path] = found[path]
            else:
                now.pop(path, None)
        return {path: file for path, file in now.items() if file is not None or path in self._clean}, unread

    async def _listed(self) -> dict[str, str]:
        listed = await self._sandbox.run(LISTING, cwd=self._workdir, output_bytes=MOST_LISTED_BYTES)
        if not listed.ok or listed.stdout.omitted:
            return {}
        stamps = {}
        for line in listed.stdout.text().split("\0")[:-1]:
            time, size, path = line.split(" ", 2)
            stamps[path] = f"{time} {size}"
        return stamps

    async def _read(self, path: str) -> list[Entry]:
        try:
            entries = await self._sandbox.download(f"{self._workdir}/{path}", most_bytes=MOST_READ_BYTES)
        except (OSError, ValueError):  # the agent's commands go on in the background
            return []
        return [replace(entries[0], path=path)] if len(entries) == 1 else []


def _lines(path: str, before: File | None, now: File | None) -> str:
    """How a file changed, such as `+3 -1`, `+2 -0 (new)` or `binary`."""
    patch = patch_of({} if before is None else {path: before}, {path: now})
    body = patch.partition("\n@@")[2].split("\n")[1:]
    plus, minus = (sum(line.startswith(sign) for line in body) for sign in "+-")
    count = "binary" if "\nGIT binary patch\n" in patch else f"+{plus} -{minus}"
    return f"{count} (new)" if before is None else f"{count} (deleted)" if now is None else count

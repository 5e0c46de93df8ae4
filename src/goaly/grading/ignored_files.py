"""Which new files git would ignore, by `.gitignore` files that are given as bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping


class IgnoreRules:
    """Whether git would ignore a new file at a path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` are `.gitignore` files by their paths."""
        self._rules: list[tuple[str, bool, bool, re.Pattern[str]]] = []
        for path in sorted(files, key=lambda one: one.count("/")):
            for line in files[path].decode(errors="replace").splitlines():
                self._add(path.removesuffix(".gitignore"), line)

    def _add(self, folder: str, line: str) -> None:
        line = line.rstrip() if not line.endswith("\\ ") else line
        if not line or line.startswith("#"):
            return
        negated = line.startswith("!")
        pattern = line[negated:].removeprefix("\\") if line[negated:][:2] in ("\\#", "\\!") else line[negated:]
        only_folders = pattern.endswith("/")
        pattern = pattern.rstrip("/")
        anchored = "/" in pattern
        regex = _regex(pattern.lstrip("/"))
        if regex is not None:
            self._rules.append((folder, negated, only_folders, re.compile(regex if anchored else f"(?:.*/)?{regex}")))

    def __call__(self, path: str) -> bool:
        parts = path.split("/")
        return any(self._matches("/".join(parts[: n + 1]), n + 1 < len(parts)) for n in range(len(parts)))

    def _matches(self, path: str, is_folder: bool) -> bool:
        """The last rule that matches decides; a file in an ignored folder cannot be brought back."""
        ignored = False
        for folder, negated, only_folders, pattern in self._rules:
            if path.startswith(folder) and (is_folder or not only_folders) and pattern.fullmatch(path[len(folder) :]):
                ignored = not negated
        return ignored


def _regex(pattern: str) -> str | None:
    """A pattern of `.gitignore` as a regular expression; None if it is malformed and matches nothing."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at) and (at == 0 or pattern[at - 1] == "/"):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern[at:] == "**":
            out, at = out + ".*", at + 2
        elif pattern[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif pattern[at] == "?":
            out, at = out + "[^/]", at + 1
        elif pattern[at] == "[":
            end = pattern.find("]", at + 2)
            if end < 0:
                return None
            inside = pattern[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            out, at = out + "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]", end + 1
        else:
            at += pattern[at] == "\\" and at + 1 < len(pattern)
            out, at = out + re.escape(pattern[at]), at + 1
    try:
        re.compile(out)
    except re.error:
        return None
    return out

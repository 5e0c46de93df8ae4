"""Fenced blocks of shell commands in the text of an answer, as Markdown (CommonMark) has them."""

from __future__ import annotations

import re
from typing import Final

OPENING: Final = re.compile(r"( {0,3})(`{3,})[ \t]*([^`]*)")
"""A line that begins a block: its indentation, its fence, and the info behind it."""
CLOSING: Final = re.compile(r" {0,3}(`{3,})[ \t]*")
SHELLS: Final = ("", "bash", "sh", "shell")
"""The first words of the info of a block of commands. Blocks of other languages are prose."""


def command_blocks(text: str) -> list[str]:
    """The commands of each block, in order. A block without its closing fence is none: the answer may be cut off."""
    blocks: list[str] = []
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        if (opening := OPENING.fullmatch(line)) is None:
            continue
        indent, fence, info = opening.groups()
        inside: list[str] = []
        for held in lines:
            closing = CLOSING.fullmatch(held)
            if closing is not None and len(closing[1]) >= len(fence):
                if _first_word(info) in SHELLS:
                    blocks.append("".join(inside))
                break
            inside.append(f"{_unindented(held, len(indent))}\n")
    return blocks


def _first_word(info: str) -> str:
    return (info.split() or [""])[0].lower()


def _unindented(line: str, blanks: int) -> str:
    """The line without the indentation of its block's fence, as far as it has it."""
    own = len(line) - len(line.lstrip(" "))
    return line[min(own, blanks) :]

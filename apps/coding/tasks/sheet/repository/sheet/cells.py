"""Names of cells."""

import re

CELL = re.compile(r"([A-Z]+)([1-9]\d*)")


def position(name):
    """Column and row of a cell, both from 1: B3 is (2, 3)."""
    match = CELL.fullmatch(name.upper())
    if match is None:
        raise ValueError(f"not a cell: {name!r}")
    column = 0
    for letter in match[1]:
        column = column * 26 + ord(letter) - ord("A") + 1
    return column, int(match[2])

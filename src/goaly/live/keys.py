"""The API keys of live traffic: a name for each token. Only names are written anywhere."""

import os
from pathlib import Path

KEYS = "GOALY_KEYS"
"""Environment variable with the keys, as `NAME=TOKEN,NAME=TOKEN`."""
LOCAL = "local"
"""The name of every client, if there are no keys."""


def keys_of(file: str | None) -> dict[str, str]:
    """The name of each token: those of the lines `NAME TOKEN` of a file, or of the environment. ValueError if a line
    is none, or if two have the same token."""
    if file is not None:
        pairs = [line.split() for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    else:
        pairs = [pair.strip().split("=", 1) for pair in os.environ.get(KEYS, "").split(",") if pair.strip()]
    names: dict[str, str] = {}
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2 or not all(text and text.isascii() and " " not in text for text in pair):
            raise ValueError(f"key {number}: must be a name and a token, in ASCII and without spaces")
        if pair[1] in names:
            raise ValueError(f"key {number} ({pair[0]}): must have a token of its own")
        names[pair[1]] = pair[0]
    return names

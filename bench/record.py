"""The file of an experiment's finished runs, a line each: what makes it resume where it stopped."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from goaly.folder import open_lines
from goaly.telemetry.lines import read_lines

T = TypeVar("T")


def digest(described: Mapping[str, Any]) -> str:
    """What tells one run's settings from another's."""
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def finished(file: Path, kind: type[T]) -> list[T]:
    """The runs that the file holds, in the order in which they finished."""
    return [kind(**record) for record in read_lines(file)] if file.exists() else []


def append(file: Path, run: Any) -> None:
    """Add a finished run."""
    with os.fdopen(open_lines(file), "ab") as out:
        out.write(json.dumps(asdict(run)).encode() + b"\n")

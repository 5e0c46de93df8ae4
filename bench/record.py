"""The file of an experiment's finished runs, a line each: what makes it resume where it stopped."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def digest(described: Mapping[str, Any]) -> str:
    """What tells one run's settings from another's."""
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def finished(file: Path, kind: type[T]) -> list[T]:
    """The runs that the file holds, in the order in which they finished."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [kind(**json.loads(line)) for line in lines]


def append(file: Path, run: Any) -> None:
    """Add a finished run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(asdict(run)) + "\n")

"""The records of the gate, one JSON line each, in the order in which they happened.

live-3: A record is on disk before anyone acts on it: a promoted version is served, a refused one leads to a roll
    back, and a candidate is asked, only after the record that says so.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from goaly.base.atomic_files import append, open_lines, whole_lines
from goaly.base.errors import CorruptLog
from goaly.live.decision import Decision, OnRegression

GATE_FILE = "gate.jsonl"
"""In the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """A policy's answer to the prompt of a pair, judged."""

    score: float
    """In [0, 1]. An episode that failed or was late has 0."""
    action: str
    """Its action; see `ActionKind`."""
    length: float
    """Its tokens as a share of the most that an answer may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The gate began, with this version served, which no test has seen."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The answers of the first served version to each canary prompt, which later versions are compared with."""

    version: int
    answers: Mapping[str, tuple[JudgedAnswer, ...]]
    """By the id of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """This version became the candidate."""

    candidate: int
    served: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """A pair: the answers of candidate and served version to one prompt, drawn with the same seed."""

    candidate: int
    comparison: str
    """`canary` or `shadow`."""
    number: int
    """Counts the pairs of this comparison from 0."""
    prompt: str
    """The id of the prompt."""
    answers: tuple[JudgedAnswer, JudgedAnswer] | None
    """Those of the candidate and of the served version; None if no judge scored both. Such a pair counts as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The end of a candidate, with the numbers that led to it."""

    candidate: int
    served: int
    """The version that it was compared with."""
    decision: Decision
    why: str
    then: OnRegression | None = None
    """The reaction, if it was refused."""
    evidence: Mapping[str, Mapping[str, Any]]
    """Of each test, as a dictionary of its `Evidence`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The trainer has the weights and the optimizer's state of the served version again. Versions up to `newest` were
    trained before that, and are never candidates."""

    served: int
    newest: int


GateRecord = Opened | Baseline | Chosen | ComparedPair | Decided | RolledBack
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(GateRecord)}


class GateLog:
    """Appends records to the gate's file; each is on disk on return (live-3)."""

    def __init__(self, file: Path):
        self._descriptor = open_lines(file)

    def write(self, record: GateRecord) -> None:
        """Append the record; OSError if the disk does not take it."""
        kind = type(record)
        content = {"kind": kind.__name__, **_adapter(kind).dump_python(record, mode="json")}
        line = json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        append(self._descriptor, line)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def gate_records(file: Path) -> Iterator[GateRecord]:
    """The records of the gate's file in order; none if there is no file. A last line without an end is no record."""
    if not file.exists():
        return
    for number, line in enumerate(whole_lines(file), 1):
        try:
            content = json.loads(line)
            yield _adapter(_KINDS[content.pop("kind")]).validate_python(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptLog(f"{file}, line {number}: is no record of a gate: {error}") from error


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

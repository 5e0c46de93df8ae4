"""JSON text: append-only files of JSON lines, and JSON that others wrote (a policy, a client, a tool, an environment).

A line is one `write` to a file opened for appending, so lines of several processes never interleave. Half a line, which
a full disk or a crash left, is removed: at once, or when the file is opened again. Only that line is lost. Writing and
closing never raise, and wait for nothing but the kernel's page cache. When the disk is full, the failure is logged
once, the file takes no more lines, and `lost` counts the missing ones. A line is strict JSON: values without a JSON
form are written as text, and numbers that are not finite as null.
"""

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from goaly.base.atomic_files import append, mend_last_line, open_lines

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 16

MOST_CHARACTERS = 64 << 20
MOST_DEPTH = 64
"""Objects and lists within each other. The schemas of vLLM's grammars may have as many."""


class LineFile:
    """A file of JSON lines for appending. Threads and processes may share it."""

    def __init__(self, path: str | Path):
        """A file that can't be opened raises at once, before training starts."""
        self.path = Path(path)
        self.lost = 0
        self._lock = threading.Lock()
        self._fd: int | None = open_lines(self.path)

    def write(self, *records: Any) -> None:
        """Append a line for each record."""
        try:
            encoded = b"".join(_line(record) for record in records)
        except (TypeError, ValueError, RecursionError) as error:
            self._gave_up(len(records), error, close=False)
            return
        with self._lock:
            if self._fd is None:
                self.lost += len(records)
                return
            try:
                append(self._fd, encoded)
            except OSError as error:
                self._gave_up(len(records), error, close=True)

    def close(self) -> None:
        """Close the file; later lines are counted as lost."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        descriptor, self._fd = self._fd, None
        try:
            if descriptor is not None:
                os.close(descriptor)
        except OSError as error:  # a network file system reports here that it could not keep earlier lines
            if not self.lost:
                logger.warning("%s: the last records may be lost: %s", self.path, error)

    def _gave_up(self, records: int, error: Exception, *, close: bool) -> None:
        if not self.lost:
            logger.warning("%s: a record could not be written and is lost: %s", self.path, error)
        self.lost += records
        if close and self._fd is not None:
            with suppress(OSError):
                mend_last_line(self._fd)
            self._close()


def _line(record: Any) -> bytes:
    # A lone surrogate has no UTF-8 form; its backslash form is JSON's escape for it.
    try:
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # strict JSON has no NaN and no infinity
        text = json.dumps(_finite(record), separators=(",", ":"), ensure_ascii=False, default=str, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def last_record(path: str | Path) -> dict[str, Any] | None:
    """The last whole record of a line file; None if there is none. Reads the end of the file only."""
    try:
        with open(path, "rb") as file:
            size = left = file.seek(0, os.SEEK_END)
            while left:
                left = max(0, left - TAIL_BYTES)
                file.seek(left)
                lines = file.read(size - left).split(b"\n")
                for line in reversed(lines if left == 0 else lines[1:]):
                    with suppress(ValueError):
                        if isinstance(record := json.loads(line), dict):
                            return record
    except FileNotFoundError:
        pass
    return None


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a line file, without lines that a crash left half-written."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def bounded_json(text: str | bytes) -> Any:
    """The value of this text. ValueError if it is not JSON in Unicode, is longer or deeper than the limits, or has a
    number that is not finite or larger than any float."""
    from pydantic_core import from_json  # most processes never read such JSON

    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters of JSON, must have at most {MOST_CHARACTERS}")
    encoded = text.encode() if isinstance(text, str) else text  # ValueError for a lone surrogate
    value = from_json(encoded, allow_inf_nan=False)
    level, depth = [value], 0
    while level:
        for each in level:
            if isinstance(each, int | float) and not abs(each) <= sys.float_info.max:
                raise ValueError("has a number that is larger than any float, must be finite")
        holders = [each for each in level if isinstance(each, dict | list)]
        depth += bool(holders)
        if depth > MOST_DEPTH:
            raise ValueError(f"is nested too deeply, must have at most {MOST_DEPTH} levels")
        level = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
    return value

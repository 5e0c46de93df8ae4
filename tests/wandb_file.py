"""Reads what Weights & Biases wrote in offline mode: LevelDB's log format, with a protobuf in each record."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER = 32_768, 7
HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4


def offline_files(run_dir: Path) -> list[Path]:
    """The file of each start of this run, the first one first."""
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def records(file: Path) -> Iterator[Any]:
    """The records of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = file.read_bytes(), FILE_HEADER, b""
    while at + HEADER.size <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER.size:  # too short for a header, so it is padding
            at += left
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        at += HEADER.size + length
        if at > len(content):
            return  # it is being written
        piece = content[at - length : at]
        whole = piece if kind in (FULL, FIRST) else whole + piece
        if kind in (FULL, LAST):
            yield Record.FromString(whole)


def history(file: Path) -> list[dict[str, Any]]:
    """What was logged, without W&B's own keys."""
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.HasField("history")
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]

"""Removes conversations from the log of a run that is not under way.

The trajectories of a conversation keep their lengths and rewards, so that batches and steps stay what they were. All
else of them goes: their tokens become padding, nothing of them is trained, and texts in notes and names of tools are
removed. A replay trains the other trajectories only, so the versions that it makes differ from then on.

The new log is written beside the old one and takes its place at once: a crash leaves one of the two, whole.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from goaly.base.atomic_files import put_in_place
from goaly.journal.records import Record, Snapshot
from goaly.journal.run_log import RunLog, records
from goaly.trajectory import FORM_WEIGHTS, NO_VERSION, Group, TensorDict, Trajectory

FORGOTTEN = "forgotten"
"""Stands in for the id of a conversation that was removed."""
KEPT_TEXTS = ("kind",)
"""Keys of notes whose texts stay: they say nothing of the conversation."""


def redact(log: Path, conversations: Collection[str]) -> int:
    """Remove trajectories with these prompt ids from a log; how many there were. RunFailed if the run is under way."""
    staging = log.with_name(f".{log.name}.redacted")
    shutil.rmtree(staging, ignore_errors=True)
    old, removed = RunLog(log), 0  # holds the lock of the log's writer, and cuts off a torn tail
    try:
        new = RunLog(staging)
        try:
            for record in records(log):
                changed, count = redacted(record, conversations)
                removed += count
                new.record(changed)
        finally:
            new.close()
        if removed:
            put_in_place(staging, log)
    finally:
        old.close()
        shutil.rmtree(staging, ignore_errors=True)
    return removed


def redacted(record: Record, conversations: Collection[str]) -> tuple[Record, int]:
    """The record without these conversations, and how many trajectories it had of them. A snapshot counts as none: its
    groups have records of their own, unless those were deleted."""
    match record:
        case Snapshot():
            inner = [redacted(one, conversations) for one in record.records]
            return replace(record, records=tuple(one for one, _ in inner)), sum(count for _, count in inner)
        case Group() if any(sample.prompt_id in conversations for sample in record.samples):
            samples = [_without(one) if one.prompt_id in conversations else one for one in record.samples]
            count = sum(one is not other for one, other in zip(samples, record.samples, strict=True))
            made = Group(
                ticket=record.ticket,
                prompt_id=record.prompt_id,
                source=record.source,
                samples=tuple(samples),
                counts=record.counts,
                left=record.left,
            )
            return made, count
        case _:
            return record, 0


def _without(sample: Trajectory) -> Trajectory:
    """A trajectory of the same length and reward, with nothing else of this one."""
    empty: dict[str, torch.Tensor] = {}
    for name in map(str, sample.tokens.keys()):
        column: torch.Tensor = sample.tokens[name]
        fill = {"sampler_versions": NO_VERSION, FORM_WEIGHTS: 1}.get(name, 0)
        empty[name] = column.clone() if name == "rewards" else torch.full_like(column, fill)
    return replace(
        sample,
        tokens=TensorDict(empty, batch_size=sample.tokens.batch_size),
        prompt_id=FORGOTTEN,
        turns=tuple(replace(turn, calls=()) for turn in sample.turns),
        notes=_plain(sample.notes),
    )


def _plain(notes: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The numbers in these notes, which later stages may read."""

    def kept(key: str, value: Any) -> Any:
        if isinstance(value, (int, float)) or value is None or key in KEPT_TEXTS:
            return value
        return FORGOTTEN

    return tuple({key: kept(key, value) for key, value in note.items()} for note in notes)

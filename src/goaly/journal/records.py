"""The records of a run's log: the queue's events, the prompts that were drawn and more, each as one safetensors file.

The tensors are the token columns of a group, the column of an annotation or the records in a snapshot; everything else
is JSON in the file's metadata.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
from pydantic import TypeAdapter

from goaly.backlog.events import Annotated, Event
from goaly.base.safetensors_file import Buffer, TensorFile, tensor_file
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import Prompt
from goaly.trajectory import Group

COLUMN = "column"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The script drew this prompt for a ticket."""

    ticket: int
    prompt: Prompt
    mixture: dict[str, Any]
    """The state of the prompt mixture after the draw: the data position of every source, and the curriculum."""
    learned: int
    """The mixture has learned from the batches before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A process began to work on the run, with a trainer of this policy version."""

    policy_version: int
    trainer: dict[str, Any]
    """The trainer's settings from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy version was published, with this digest of its parameters."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state that the records before it lead to: a reader may begin here."""

    policy_version: int
    """The version that the newest trained batch made."""
    queue: dict[str, Any]
    """The state of the queue as plain values."""
    passes: dict[int, Mapping[str, Passes]]
    """The passes of batches from which the prompt mixture had not learned before the last draw."""
    records: "tuple[Record, ...]"
    """Records before it that still count: groups and columns that the queue holds, digests, prompts of running tickets,
    the last draw and the settings of the trainer."""


Record = Event | Drawn | Published | Resumed | Snapshot
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Record)}
_PassesByBatch = dict[int, dict[str, Passes]]


def encode(record: Record) -> list[Buffer]:
    """The record as the buffers of one safetensors file, in order. They share the memory of its tensors."""
    tensors: dict[str, torch.Tensor | list[Buffer]] = {}
    match record:
        case Group():
            return [record.encoded()]
        case Annotated():
            content: Any = {"batch": record.batch, "key": record.key, "places": record.places}
            tensors[COLUMN] = record.values_T
        case Snapshot():
            passes = _adapter(_PassesByBatch).dump_python(record.passes, mode="json")
            content = {"policy_version": record.policy_version, "queue": record.queue, "passes": passes}
            tensors |= {str(number): encode(one) for number, one in enumerate(record.records)}
        case _:
            content = _adapter(type(record)).dump_python(record, mode="json")
    return tensor_file({"kind": type(record).__name__, "content": json.dumps(content)}, tensors)


def decode(payload: Buffer) -> Record:
    """The record that `encode` made these bytes of."""
    file = TensorFile.read(payload)
    kind, content = _KINDS[file.metadata["kind"]], file.metadata["content"]
    if kind is Group:
        return Group.decoded(bytearray(payload))
    if kind is Annotated:
        values_T = TensorFile.read(bytearray(payload)).tensors()[COLUMN]
        known = json.loads(content)
        return Annotated(**known | {"places": tuple(known["places"])}, values_T=values_T)
    if kind is Snapshot:
        known = json.loads(content)
        passes = _adapter(_PassesByBatch).validate_python(known["passes"])
        records = tuple(decode(nested) for nested in file.contents.values())
        return Snapshot(**known | {"passes": passes}, records=records)
    return _adapter(kind).validate_python(json.loads(content))


def kind_of(payload: Buffer) -> type:
    """The class of an encoded record."""
    return _KINDS[TensorFile.read(payload).metadata["kind"]]


def snapshot_version(payload: Buffer) -> int | None:
    """The policy version of an encoded snapshot; None if it is another record."""
    metadata = TensorFile.read(payload).metadata
    return json.loads(metadata["content"])["policy_version"] if _KINDS[metadata["kind"]] is Snapshot else None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

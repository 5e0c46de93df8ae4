"""The records of a run's log: the queue's events and the prompts that were drawn, each as one safetensors file.

The tensors are the token columns of a group or the column of an annotation; everything else is JSON in the file's
metadata.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import safetensors.numpy
import safetensors.torch
import torch
from pydantic import TypeAdapter

from goaly.backlog.events import Annotated, Event
from goaly.prompts.prompt import Prompt
from goaly.trajectory import Group, GroupParts, SampleFacts

TOKENS = "tokens"
COLUMN = "column"
METADATA = "__metadata__"


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


Record = Event | Drawn | Published | Resumed
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Record)}


def encode(record: Record) -> bytes:
    """The record as bytes."""
    columns: dict[str, torch.Tensor] = {}
    if isinstance(record, Group):
        parts = record.parts()
        content: dict[str, Any] = {
            "facts": parts.facts,
            "samples": _adapter(list[SampleFacts]).dump_python(parts.samples, mode="json"),
        }
        columns = parts.columns | {TOKENS: parts.columns[TOKENS].int()}  # no vocabulary has 2^31 tokens
    elif isinstance(record, Annotated):
        content = {"batch": record.batch, "key": record.key, "places": record.places}
        columns = {COLUMN: record.values_T}
    else:
        content = _adapter(type(record)).dump_python(record, mode="json")
    metadata = {"kind": type(record).__name__, "content": json.dumps(content)}
    return safetensors.numpy.save({name: column.numpy() for name, column in columns.items()}, metadata)


def decode(payload: bytes) -> Record:
    """The record that `encode` made these bytes of."""
    kind, content = kind_of(payload), json.loads(_metadata(payload)["content"])
    if kind is Annotated:
        places = tuple(content.pop("places"))
        return Annotated(**content, places=places, values_T=safetensors.torch.load(payload)[COLUMN])
    if kind is not Group:
        return _adapter(kind).validate_python(content)
    columns = safetensors.torch.load(payload)
    columns[TOKENS] = columns[TOKENS].long()
    return GroupParts(
        content["facts"], _adapter(list[SampleFacts]).validate_python(content["samples"]), columns
    ).group()


def kind_of(payload: bytes) -> type:
    """The class of an encoded record."""
    return _KINDS[_metadata(payload)["kind"]]


def _metadata(payload: bytes) -> dict[str, str]:
    return json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])[METADATA]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

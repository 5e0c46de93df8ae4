"""Records of JSONL and Parquet files, read as prompts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.parquet

from goaly.prompts.prompt import Message, Prompt

_OWN_KEYS = ("id", "source", "messages", "prompt", "answer")


def read_records(file: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every record of a file, with the place that an error should name."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        for number, record in enumerate(pyarrow.parquet.read_table(path).to_pylist()):
            yield f"{path}, row {number}", record
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}, line {number}", _record(line, f"{path}, line {number}")


def read_prompts(files: Sequence[str | Path]) -> tuple[Prompt, ...]:
    """The prompts of these files, in their order."""
    return tuple(_prompt(record, place) for file in files for place, record in read_records(file))


def read_messages(record: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    """A record's `messages`, or its `prompt` as a user's message."""
    if record.get("messages") is not None:
        try:
            return tuple(Message(role=entry["role"], content=entry["content"]) for entry in record["messages"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{place}: `messages` must be a list of {{role, content}}") from error
    if isinstance(record.get("prompt"), str):
        return (Message(role="user", content=record["prompt"]),)
    raise ValueError(f"{place}: needs `messages` (a list of {{role, content}}) or `prompt` (a text)")


def _record(line: str, place: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object")
    return record


def _prompt(record: Mapping[str, Any], place: str) -> Prompt:
    messages = read_messages(record, place)
    answer = record.get("answer")
    content = "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)
    return Prompt(
        id=str(record.get("id") or blake2b(content.encode(), digest_size=8).hexdigest()),
        source=str(record.get("source") or Path(place.rsplit(",", 1)[0]).stem),
        messages=messages,
        answer=None if answer is None else str(answer),
        metadata={key: str(value) for key, value in record.items() if key not in _OWN_KEYS and value is not None},
    )

"""Records of JSONL and Parquet files, read as prompts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.parquet

from goaly.prompts.prompt import Message, Prompt

_OWN_KEYS = ("id", "source", "messages", "prompt", "answer", "tools")
_MESSAGE_KEYS = {key.name for key in fields(Message)} - {"extra"}


def read_records(file: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every record of a file, with its place for errors."""
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
    """The prompts of these files, in order. An unchanged file is read only once."""
    return tuple(prompt for file in files for prompt in _prompts_of(str(file), _state(Path(file))))


@lru_cache(maxsize=64)
def _prompts_of(file: str, state: tuple[int, ...]) -> tuple[Prompt, ...]:
    return tuple(_prompt(record, place) for place, record in read_records(file))


def _state(path: Path) -> tuple[int, ...]:
    """Changes whenever the content of the file does."""
    status = path.stat() if path.is_file() else None
    return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def read_messages(record: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    """A record's `messages`, or its `prompt` as a user's message."""
    if record.get("messages") is not None:
        try:
            return tuple(_message(entry) for entry in record["messages"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place}: `messages` must be a list of {{role, content}}") from error
    if isinstance(record.get("prompt"), str):
        return (Message(role="user", content=record["prompt"]),)
    raise ValueError(f"{place}: needs `messages` (a list of {{role, content}}) or `prompt` (a text)")


def read_tools(record: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], ...]:
    """A record's `tools`: a list of JSON schemas, or the JSON text of one, which every file format can hold."""
    tools = record.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: `tools` is not JSON: {error}") from error
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{place}: `tools` must be a list of JSON schemas")
    return tuple(tools)


def _message(entry: Mapping[str, Any]) -> Message:
    """A message with all keys of its record; a Parquet file has None for missing keys."""
    content = entry["content"] if "tool_calls" not in entry else entry.get("content")
    said = {key: value for key, value in entry.items() if value is not None and key != "content"}
    named = {key: said.pop(key) for key in list(said) if key in _MESSAGE_KEYS}
    return Message(**named, content=content, extra=said)


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
    content = "\x1e".join(message.key for message in messages)
    return Prompt(
        id=str(record.get("id") or blake2b(content.encode(), digest_size=8).hexdigest()),
        source=str(record.get("source") or Path(place.rsplit(",", 1)[0]).stem),
        messages=messages,
        answer=None if answer is None else str(answer),
        tools=read_tools(record, place),
        metadata={key: str(value) for key, value in record.items() if key not in _OWN_KEYS and value is not None},
    )

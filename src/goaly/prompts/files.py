"""Records of files, read as prompts and messages."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from goaly.base.registry import function_at
from goaly.prompts.blocks import (
    POOL_BLOCKS,
    Block,
    FileRecord,
    Location,
    blocks_of,
    distinct_records,
    read_block,
    value_of,
)
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.settings import ColumnSettings
from goaly.prompts.template import text_of

DEFAULT = ColumnSettings()
_OWN_KEYS = ("id", "source", "messages", "prompt", "answer", "tools")


def read_prompts(
    files: Sequence[str | Path], columns: ColumnSettings = DEFAULT, *, distinct: bool = False, reader: str | None = None
) -> tuple[Prompt, ...]:
    """The prompts at the beginning of each file, in order: of a file of one pool, all of them. With `distinct` all
    different prompts of each file, and with a reader all that it gives."""
    if reader is not None:
        return tuple(prompt for file in files for prompt in prompts_by(reader, str(file)))
    if distinct:
        return tuple(prompt for file in files for prompt in distinct_prompts_of(str(file), columns))
    blocks = [block for file in files for block in blocks_of([str(file)])[:POOL_BLOCKS]]
    return tuple(prompt for block in blocks for prompt in prompts_of(block, columns))


def prompts_of(block: Block, columns: ColumnSettings = DEFAULT) -> tuple[Prompt, ...]:
    """The prompts of a block. The checks of the settings and the streams of a run read a small file only once."""
    return _parsed(block, columns, _state(block.file))


def distinct_prompts_of(file: str, columns: ColumnSettings = DEFAULT) -> tuple[Prompt, ...]:
    """The prompts of a file without those that repeat the messages and the answer of an earlier one. Read once, too."""
    return _distinct(file, columns, _state(file))


def prompts_by(reader: str, file: str) -> tuple[Prompt, ...]:
    """The prompts that a user's function, `package.module:function`, reads from a file or a folder. Read once, too."""
    return _read_by(reader, file, _state(file))


def fingerprint_by(reader: str, files: Sequence[str]) -> str:
    """Identifies the prompts that a user's function reads from these files."""
    digest = blake2b(digest_size=8)
    for prompt in read_prompts(files, reader=reader):
        digest.update(f"{prompt.id}\0{prompt.split_key}\0{prompt.answer}\0".encode())
    return f"{list(files)} {reader} {digest.hexdigest()}"


def _state(file: str) -> tuple[int, ...]:
    """Changes whenever the content of the file does."""
    status = Path(file).stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=POOL_BLOCKS)
def _parsed(block: Block, columns: ColumnSettings, state: tuple[int, ...]) -> tuple[Prompt, ...]:
    return tuple(_prompt(location, record, columns) for location, record in read_block(block))


@lru_cache(maxsize=POOL_BLOCKS)
def _read_by(reader: str, file: str, state: tuple[int, ...]) -> tuple[Prompt, ...]:
    return tuple(function_at(reader)(file))


@lru_cache(maxsize=POOL_BLOCKS)
def _distinct(file: str, columns: ColumnSettings, state: tuple[int, ...]) -> tuple[Prompt, ...]:
    names = ("messages", "prompt") if columns.prompt is None else (columns.prompt,)
    records = distinct_records(file, (*names, columns.answer))
    return tuple(_prompt(location, record, columns) for location, record in records)


def _prompt(location: Location, record: FileRecord, columns: ColumnSettings) -> Prompt:
    messages = read_messages(record, location, columns)
    answer = _named(record, "answer", columns, location)
    content = "\x1e".join(message.key for message in messages)
    own = {*_OWN_KEYS, *(name.partition(".")[0] for name in (columns.prompt or "", columns.answer, columns.id))}
    return Prompt(
        id=str(_named(record, "id", columns, location) or blake2b(content.encode(), digest_size=8).hexdigest()),
        source=str(_named(record, "source", columns, location) or Path(location.file).stem),
        messages=messages,
        answer=None if answer is None else str(answer),
        tools=read_tools(record, location),
        metadata={key: str(value) for key, value in record.items() if key not in own and value is not None},
    )


def _named(record: FileRecord, key: str, columns: ColumnSettings, location: Location | str) -> Any:
    """The value of the column that `columns` names for this key. A column with a name of its own must exist."""
    name = getattr(columns, key)
    value = value_of(record, name)
    if value is None and name != getattr(DEFAULT, key):
        raise ValueError(f"{location}: has no value in columns.{key}={name}; its columns are {', '.join(record)}")
    return value


def read_messages(
    record: Mapping[str, Any], location: Location | str, columns: ColumnSettings = DEFAULT
) -> tuple[Message, ...]:
    """A record's messages: those of its prompt column, or its text as a user's message."""
    if columns.prompt is not None:
        name, value = columns.prompt, _named(record, "prompt", columns, location)
    else:
        name = "prompt" if record.get("messages") is None else "messages"
        value = record.get(name)
    if name != "messages" and isinstance(value, str):
        return (Message(role="user", content=columns.wording.replace("{prompt}", value)),)
    if value is None:
        raise ValueError(
            f"{location}: needs `messages` (a list of {{role, content}}) or `prompt` (the same, or a text)"
        )
    if columns.wording != DEFAULT.wording:
        raise ValueError(f"{location}: `{name}` must be a text where columns.wording is set, it is a list of messages")
    try:
        return tuple(_message(entry) for entry in value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{location}: `{name}` must be a list of {{role, content}}") from error
    except ValueError as error:
        raise ValueError(f"{location}: `{name}`: {error}") from error


def read_tools(record: Mapping[str, Any], location: Location | str) -> tuple[Mapping[str, Any], ...]:
    """A record's `tools`: a list of JSON schemas, or the JSON text of one, which every file format can hold."""
    tools = record.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"{location}: `tools` is not JSON: {error}") from error
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{location}: `tools` must be a list of JSON schemas")
    return tuple(tools)


def _message(entry: Mapping[str, Any]) -> Message:
    """A message with all keys of its record; a Parquet file has None for missing keys."""
    content = entry["content"] if "tool_calls" not in entry else entry.get("content")
    text_of("" if content is None else content)
    return Message.of({**entry, "content": content})

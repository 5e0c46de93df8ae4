"""Records of files, read as prompts and messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from goaly.prompts.blocks import POOL_BLOCKS, Block, FileRecord, Location, blocks_of, read_block
from goaly.prompts.prompt import Message, Prompt

_OWN_KEYS = ("id", "source", "messages", "prompt", "answer", "tools")
_MESSAGE_KEYS = {key.name for key in fields(Message)} - {"extra"}


def read_prompts(files: Sequence[str | Path]) -> tuple[Prompt, ...]:
    """The prompts at the beginning of each file, in order: of a file of one pool, all of them."""
    blocks = [block for file in files for block in blocks_of([str(file)])[:POOL_BLOCKS]]
    return tuple(prompt for block in blocks for prompt in prompts_of(block))


def prompts_of(block: Block) -> tuple[Prompt, ...]:
    """The prompts of a block. The checks of the settings and the streams of a run read a small file only once."""
    status = Path(block.file).stat()
    return _parsed(block, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=POOL_BLOCKS)
def _parsed(block: Block, state: tuple[int, ...]) -> tuple[Prompt, ...]:
    """`state` changes whenever the content of the file does."""
    return tuple(_prompt(location, record) for location, record in read_block(block))


def _prompt(location: Location, record: FileRecord) -> Prompt:
    messages = read_messages(record, location)
    answer = record.get("answer")
    content = "\x1e".join(message.key for message in messages)
    return Prompt(
        id=str(record.get("id") or blake2b(content.encode(), digest_size=8).hexdigest()),
        source=str(record.get("source") or Path(location.file).stem),
        messages=messages,
        answer=None if answer is None else str(answer),
        tools=read_tools(record, location),
        metadata={key: str(value) for key, value in record.items() if key not in _OWN_KEYS and value is not None},
    )


def read_messages(record: Mapping[str, Any], location: Location | str) -> tuple[Message, ...]:
    """A record's `messages`, or its `prompt` as a user's message."""
    if record.get("messages") is not None:
        try:
            return tuple(_message(entry) for entry in record["messages"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{location}: `messages` must be a list of {{role, content}}") from error
    if isinstance(record.get("prompt"), str):
        return (Message(role="user", content=record["prompt"]),)
    raise ValueError(f"{location}: needs `messages` (a list of {{role, content}}) or `prompt` (a text)")


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
    said = {key: value for key, value in entry.items() if value is not None and key != "content"}
    named = {key: said.pop(key) for key in list(said) if key in _MESSAGE_KEYS}
    return Message(**named, content=content, extra=said)

"""What a file's records become: messages with all that templates read, and tools."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from goaly.prompts.files import read_messages, read_prompts
from goaly.prompts.prompt import Message

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add", "weight": 2},
]


def jsonl(folder: Path, *records: dict) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_messages_keep_what_a_template_reads(tmp_path: Path):
    (prompt,) = read_prompts([jsonl(tmp_path, {"messages": CHAT, "answer": "3"})])
    assert [message.as_dict() for message in prompt.messages] == CHAT
    assert prompt.messages[1].tool_calls == [CALL]
    assert prompt.messages[2].extra == {"weight": 2}
    assert prompt.metadata == {}


def test_a_key_that_a_parquet_file_gives_every_message_is_only_where_it_has_a_value(tmp_path: Path):
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": CHAT, "tools": json.dumps([TOOL])}]), path)
    (prompt,) = read_prompts([path])
    assert [message.as_dict() for message in prompt.messages] == CHAT
    assert prompt.tools == (TOOL,)


def test_a_call_without_content_is_a_message_and_nothing_at_all_is_none():
    (message,) = read_messages({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "here")
    assert message.as_dict() == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    for entry in ({"role": "assistant"}, {"content": "1"}, "1", None):
        with pytest.raises(ValueError, match="here: `messages` must be a list of"):
            read_messages({"messages": [entry]}, "here")


def test_contents_are_texts_or_parts_of_text():
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2", "image": None}]
    (message,) = read_messages({"messages": [{"role": "user", "content": parts}]}, "here")
    assert message.content == parts
    for content in ([{"type": "image", "image": "1"}], 5, ["1"]):
        with pytest.raises(ValueError, match=r"here: `messages`: content=.* must be a text or a list of parts"):
            read_messages({"messages": [{"role": "user", "content": content}]}, "here")


def test_tools_are_a_list_of_schemas_or_its_json_text_and_no_metadata(tmp_path: Path):
    prompts = read_prompts([jsonl(tmp_path, *({"prompt": "1", "tools": tools} for tools in ([TOOL], None, "[]")))])
    assert [prompt.tools for prompt in prompts] == [(TOOL,), (), ()]
    assert prompts[0].metadata == {}
    for wrong, why in ((["add"], "must be a list of JSON schemas"), ("{", "is not JSON"), ({"a": 1}, "must be a list")):
        with pytest.raises(ValueError, match=rf"line 1: `tools` {why}"):
            read_prompts([jsonl(tmp_path, {"prompt": "1", "tools": wrong})])


def test_prompts_that_differ_in_a_call_differ_in_id_and_split_key(tmp_path: Path):
    other = [CHAT[0], {**CHAT[1], "tool_calls": []}]
    one, two, plain = read_prompts(
        [jsonl(tmp_path, {"messages": CHAT[:2]}, {"messages": other}, {"messages": [CHAT[0]]})]
    )
    assert len({one.id, two.id, plain.id}) == len({one.split_key, two.split_key, plain.split_key}) == 3
    assert plain.split_key == "user\x1f1+2="  # as it always was: no problem changes its split
    assert Message(role="user", content="1+2=").key == plain.split_key

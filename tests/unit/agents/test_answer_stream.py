"""What clients see of an answer before its end is the beginning of what they get at its end."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agent_sessions import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.agents.answer_parser import AnswerParser
from goaly.agents.answer_stream import AnswerStream, Reader
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.prompts.prompt import ASSISTANT, Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

WRITTEN = [
    *("<think>\nhm so\n</think>\n\n", "<think>", "</think>", "hm ", "it is 5", "\n\n", " ", "a < b <tool> {x} [y]"),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    *("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "[add(a=1)]"),
    *('<tool_call>\n{"name": "add", "argum', "</tool_call>", "stop", "sto", "s"),
]
ALIKE = [("hermes", "qwen3"), ("hermes", None), (None, "deepseek_r1"), (None, None)]
"""Parsers that read parts as they read the whole."""
OTHERS = [("qwen3_coder", "qwen3"), ("glm45", "glm45"), ("pythonic", None)]


def completed(chat: ChatTokenizer, text: str, stop: str | None = None) -> Completion:
    """An answer with this text, ended by this stop string or by a stop token."""
    tokens = torch.tensor([*chat.encode(text), *([] if stop else chat.stop_token_ids[:1])])
    facts: dict[str, Any] = {"logprobs": torch.zeros(len(tokens)), "versions": torch.zeros(len(tokens)), "stop": stop}
    return Completion(prompt=(), tokens=tokens, finish=Finish.STOP, text=text, **facts)


def write(stream: AnswerStream, tokens: Sequence[int], rng: random.Random) -> Reader:
    """Write these tokens but the last one; a client has taken some of the pieces."""
    reader, at = Reader(), 0
    while at < len(tokens) - 1:
        part = tokens[at : min(at + rng.randint(1, 3), len(tokens) - 1)]
        stream.wrote(VersionedTokens(list(part), [0.0] * len(part), [0] * len(part)))
        at += len(part)
        if rng.random() < 0.5:
            reader.take(stream.pieces)
    return reader


@pytest.fixture(scope="module")
def parsers(chats: dict[str, ChatTokenizer]) -> dict[tuple[str | None, str | None], AnswerParser]:
    found = {}
    for tool, reasoning in ALIKE + OTHERS:
        found[tool, reasoning] = AnswerParser(
            chats["qwen3"], ChatSettings(tool_parser=tool, reasoning_parser=reasoning)
        )
        found[tool, reasoning].load()
    return found


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(WRITTEN), max_size=6),
    choice=st.sampled_from(["auto", "auto", "none", "required"]),
    names=st.sampled_from(ALIKE + OTHERS),
    stops=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_the_pieces_of_an_answer_are_the_message_that_is_recorded(
    parsers: Any,
    chats: dict[str, ChatTokenizer],
    pieces: list[str],
    choice: str,
    names: Any,
    stops: bool,
    rng: random.Random,
) -> None:
    parser, text = parsers[names], "".join(pieces)
    stop = "stop" if stops and "stop" in text else None
    if stop is not None:
        text = text[: text.index(stop) + len(stop)]
    completion = completed(chats["qwen3"], text, stop)
    whole = parser.message(completion, TOOLS, choice=choice)
    stream = parser.stream(TOOLS, choice=choice, stops=["stop"] if stops else [])
    write(stream, completion.tokens.tolist(), rng)
    recorded = parser.as_shown(whole, completion, stream)
    shown = "".join(piece.reasoning for piece in stream.pieces), "".join(piece.content for piece in stream.pieces)
    assert (recorded.reasoning_content or "").startswith(shown[0])
    assert (recorded.content or "").startswith(shown[1])
    assert recorded.tool_calls == whole.tool_calls
    if names in ALIKE and "think>" not in text.removeprefix(WRITTEN[0]):
        assert recorded == whole
    if not shown[1]:
        assert recorded.content == whole.content


@given(text=st.text(alphabet="aé語🙂 \n", max_size=12), rng=st.randoms(use_true_random=False))
def test_no_piece_has_a_part_of_a_character(text: str, rng: random.Random) -> None:
    stream = AnswerStream(lambda tokens: bytes(tokens).decode(errors="replace"), (), None, lambda: None)
    write(stream, text.encode(), rng)
    shown = "".join(piece.content for piece in stream.pieces)
    assert text.startswith(shown)
    message = Message(role=ASSISTANT, content=text)
    assert stream.agreed(message, list(text.encode()), None) is message


def test_text_that_may_begin_a_stop_string_waits_until_it_cannot(chats: dict[str, ChatTokenizer]) -> None:
    stream = AnswerParser(chats["qwen3"], ChatSettings()).stream(stops=["!end"])
    seen = []
    for token in chats["qwen3"].encode("so!en!!ex"):
        stream.wrote(VersionedTokens([token], [0.0], [0]))
        seen.append("".join(piece.content for piece in stream.pieces))
    assert seen == ["s", "so", "so", "so", "so", "so", "so", "so", "so!en!!ex"]


def test_a_parser_that_breaks_shows_no_more_and_the_whole_is_sent_at_the_end(
    chats: dict[str, ChatTokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    chat = chats["qwen3"]
    parser = AnswerParser(chat, ChatSettings(tool_parser="hermes"))
    parser.load()
    stream, completion = parser.stream(TOOLS), completed(chat, "it is 5")
    tokens, reader = completion.tokens.tolist(), Reader()
    stream.wrote(VersionedTokens(tokens[:2], [0.0] * 2, [0] * 2))
    stream._reading.parser.parse_delta = None  # type: ignore[union-attr]
    stream.wrote(VersionedTokens(tokens[2:-1], [0.0] * (len(tokens) - 3), []))
    assert [piece.content for piece in stream.pieces] == ["it", ""]
    assert "a parser cannot read a stream" in caplog.text
    whole = Message(role=ASSISTANT, content="it is 5")
    assert parser.as_shown(whole, completion, stream) == whole
    assert reader.take(stream.pieces) is not None
    at_its_end = parser.stream(TOOLS)
    at_its_end.wrote(VersionedTokens(tokens[:2], [0.0] * 2, [0] * 2))
    at_its_end._reading.parser.parse_delta = None  # type: ignore[union-attr]
    other = Message(role=ASSISTANT, content="is it 5?")
    assert parser.as_shown(other, completion, at_its_end).content == "it"

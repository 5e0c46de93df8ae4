"""Texts that are too long for a context are refused before they are tokenized, and long ones let others go on."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from goaly.prompts import tokenizer as module
from goaly.prompts.tokenizer import ChatTokenizer, beside

SPECIAL = "<|a token that is longer than any other|>"
BYTES = pre_tokenizers.ByteLevel.alphabet()
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def merged(base: Sequence[str], *merges: tuple[str, str]) -> dict[str, Any]:
    vocabulary = {text: number for number, text in enumerate([*sorted(base), *(a + b for a, b in merges)])}
    return {"vocab": vocabulary, "merges": list(merges)}


DOUBLED = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
KNOWN: dict[str, tuple[Any, Any, Any]] = {
    "bytes": (BPE(**merged(BYTES, *DOUBLED)), None, BYTE_LEVEL),
    "bytes, composed": (BPE(**merged(BYTES, *DOUBLED)), normalizers.NFC(), BYTE_LEVEL),
    "bytes after a split": (
        BPE(**merged(BYTES, *DOUBLED)),
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), BYTE_LEVEL]),
    ),
}
UNKNOWN: dict[str, tuple[Any, Any, Any]] = {
    "some bytes are missing": (BPE(**merged(BYTES[:200])), None, BYTE_LEVEL),
    "spaces that are removed": (
        BPE(**merged(BYTES)),
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL]),
    ),
    "spaces that are made one": (BPE(**merged(BYTES)), normalizers.Replace(Regex(" +"), " "), BYTE_LEVEL),
    "no bytes": (BPE(**merged(["a", "b", "?"], *DOUBLED), unk_token="?"), None, None),
    "words": (WordLevel({"a": 0, "?": 1}, unk_token="?"), None, pre_tokenizers.Whitespace()),
}


def made(folder: Path, parts: tuple[Any, Any, Any], **special: bool) -> ChatTokenizer:
    model, normalizer, splits = parts
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splits is not None:
        tokenizer.pre_tokenizer = splits
    tokenizer.add_special_tokens([AddedToken(SPECIAL, **special)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("known")
    return {name: made(folder / str(number), parts) for number, (name, parts) in enumerate(KNOWN.items())}


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(list(KNOWN)),
    pieces=st.lists(st.sampled_from([SPECIAL, "a" * 8, "a", " ", "ω\u0314\u0342\u0345", "é", "語", "🙂", "\x00"])),
    times=st.integers(1, 50),
)
def test_no_text_has_fewer_tokens_than_is_said(known: Any, name: str, pieces: list[str], times: int) -> None:
    text = "".join(pieces) * times
    tokens = known[name].encode(text)
    assert known[name].fewest_tokens(text) <= len(tokens)
    assert known[name]._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids == tokens


@pytest.mark.parametrize("name", KNOWN)
def test_something_is_known_of_tokenizers_that_keep_every_character(known: Any, name: str) -> None:
    assert known[name].fewest_tokens("a" * 8000) >= 8000 // max(len(SPECIAL), 8)


@pytest.mark.parametrize("what", UNKNOWN)
def test_nothing_is_known_of_tokenizers_whose_tokens_may_stand_for_any_length(tmp_path: Path, what: str) -> None:
    assert made(tmp_path / "t", UNKNOWN[what]).fewest_tokens("a" * 8000) == 0


def test_nothing_is_known_of_a_token_that_takes_the_spaces_beside_it(tmp_path: Path) -> None:
    assert made(tmp_path / "t", KNOWN["bytes"], lstrip=True).fewest_tokens("a" * 8000) == 0


def test_a_long_text_that_cannot_fit_is_not_tokenized(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def room(tokens: int) -> None:
        asked.append(tokens)
        raise OverflowError

    monkeypatch.setattr(module, "LONG", 100)
    chat = known["bytes"]
    assert len(chat.encode("a" * 96, room)) == 12
    with pytest.raises(OverflowError):
        chat.encode("a" * 8200, room)
    assert asked == [8200 // len(SPECIAL)]
    assert len(chat.encode("a" * 8200, asked.append)) == 1025


@pytest.mark.parametrize(
    ("contents", "is_beside"),
    [
        (["a" * 60, "b" * 60], True),
        (["a", None, ["b"], {"c": 5}], False),
        ([[{"type": "text", "text": "a" * 100}]], True),
        ([{"function": {"arguments": {"code": "a" * 100}}}], True),
    ],
)
async def test_long_texts_in_messages_are_worked_on_in_a_thread(
    contents: Any, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG", 100)
    work: Callable[[], int] = threading.get_ident
    here = threading.get_ident()
    assert (await beside([*contents, "c"], work) != here) is is_beside


async def test_other_tasks_go_on_while_a_long_text_is_tokenized(known: Any) -> None:
    chat, text, turns = known["bytes"], "aé語 " * 200_000, 0
    work = asyncio.ensure_future(beside(text, lambda: chat.encode(text)))
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100

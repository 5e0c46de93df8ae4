"""The text of each token, and text that is safe to show."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st
from logged_run import STOP, LoggedRun

from goaly.journal.episode_text import one_line, pieces, safe


@settings(max_examples=40)
@given(st.lists(st.text(max_size=8) | st.just(STOP), max_size=5))
def test_the_texts_of_tokens_add_up_to_the_text(logged: LoggedRun, parts: list[str]) -> None:
    text = "".join(parts)
    tokens = logged.chat.encode(text)
    found = pieces(logged.chat, tokens)
    assert len(found) == len(tokens)
    assert "".join(found) == logged.chat.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_is_in_the_last_one(logged: LoggedRun) -> None:
    assert pieces(logged.chat, logged.chat.encode("a\N{EURO SIGN}b")) == ["a", "", "", "\N{EURO SIGN}", "b"]


@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_have_a_text_too(logged: LoggedRun, tokens: list[int]) -> None:
    assert len(pieces(logged.chat, tokens)) == len(tokens)


@given(st.text())
def test_safe_text_has_only_visible_characters_and_line_breaks(text: str) -> None:
    shown = safe(text)
    assert all(one in "\n\t" or unicodedata.category(one)[0] != "C" for one in shown)
    assert "\n" not in one_line(text)
    assert safe("a b\n\tc é 漢 \N{PILE OF POO}") == "a b\n\tc é 漢 \N{PILE OF POO}"


def test_controls_are_shown_as_escapes() -> None:
    assert safe("\x1b[2J\r\u202e\u2028\x7f") == "\\x1b[2J\\r\\u202e\\u2028\\x7f"

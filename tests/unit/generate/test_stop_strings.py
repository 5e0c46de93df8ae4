"""Stop strings are found when the token that completes them is written, however tokens and characters lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.generate.request import StopStrings, decoder

PIECES = ["a", "b", "ab", "ba", "\n", "\n\n", "b\na", "<|end|>"]
PROMPT = [0, 1, 2]


def pieces(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def found(stops: list[str], written: list[int], **options) -> tuple[int, str] | None:
    """How many tokens are written when a stop string is found, and which it is."""
    looking = StopStrings(stops, pieces, PROMPT, **options)
    for count, token in enumerate(written, start=1):
        if (stop := looking.wrote(token)) is not None:
            return count, stop
    return None


@pytest.mark.parametrize(
    ("stops", "written", "where"),
    [
        (["\n"], [0, 4, 0], (2, "\n")),
        (["\n"], [0, 6, 0], (2, "\n")),  # ends inside a token
        (["\n\n"], [4, 0, 4, 4], (4, "\n\n")),
        (["aba"], [2, 0], (2, "aba")),  # over two tokens
        (["abab", "ba"], [2, 2], (2, "ba")),  # the one that is complete first
        (["<|end|>"], [0, 7], (2, "<|end|>")),
        (["ab"], [1, 1], None),
        (["ca"], [0], None),
        (["bab"], [1], None),  # the prompt ends with "ab": a stop string lies in the answer
    ],
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(stops, written, where):
    assert found(stops, written) == where


def test_no_stop_string_ends_an_answer_before_its_least_tokens():
    assert found(["\n"], [4, 4, 4, 4], min_tokens=2) == (3, "\n")
    assert found(["\n\n"], [4, 4, 0, 5], min_tokens=2) == (4, "\n\n")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_it_is_found_where_the_whole_text_has_it_for_the_first_time(written, stops, min_tokens):
    expected = None
    for count in range(min_tokens + 1, len(written) + 1):
        before, now = pieces(written[: count - 1]), pieces(written[:count])
        ends = {at + len(stop) for stop in stops for at in range(len(now)) if now.startswith(stop, at)}
        if any(end > len(before) for end in ends):
            expected = count
            break
    result = found(stops, written, min_tokens=min_tokens)
    assert (None if result is None else result[0]) == expected


def test_a_character_of_several_tokens_is_found_when_its_last_one_is_written():
    raw = "né→x".encode()

    def decode(tokens) -> str:
        return bytes(tokens).decode(errors="replace")

    looking = StopStrings(["→"], decode, b"", 0)
    assert [looking.wrote(byte) for byte in raw] == [None] * 5 + ["→", None]


def test_bytes_that_never_become_a_character_do_not_hide_what_comes_after():
    looking = StopStrings(["|"], lambda tokens: bytes(tokens).decode(errors="replace"), b"")
    assert [looking.wrote(byte) for byte in b"\x80\x80\x80\x80\x80\x80|"][-1] == "|"


def test_the_decoder_of_a_model_folder_shows_special_tokens(tiny_model_folder):
    decode = decoder(str(tiny_model_folder))
    assert decode([2, 3, 1]) == "01<eos>"


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"stop: .* has no tokenizer\.json, .*; use stop_token_ids"):
        decoder(str(tmp_path))

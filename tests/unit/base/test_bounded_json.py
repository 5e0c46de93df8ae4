"""The reader of JSON that others wrote."""

import json
import sys

import pytest

from goaly.base import json_text as module
from goaly.base.json_text import MOST_DEPTH, bounded_json


def nested(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "ä😀\n",
        -0.0,
        2**64,
        sys.float_info.max,
        int(sys.float_info.max),
        {},
        [{"a": [1, {"b": "\x00"}]}, []],
    ],
)
def test_json_is_read_as_by_the_standard_library(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert bounded_json(text) == bounded_json(text.encode()) == json.loads(text)


def test_as_deep_as_may_be_is_read() -> None:
    for text in (nested(MOST_DEPTH), nested(MOST_DEPTH, "1")):
        assert bounded_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (nested(MOST_DEPTH + 1), "nested too deeply"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nested too deeply"),
        (nested(1_000_000), "recursion limit"),
        ("[" * 1_000_000, "recursion limit"),
        ("[1e999]", "larger than any float"),
        ('{"a": -1e999}', "larger than any float"),
        ("1" + "0" * 400, "larger than any float"),
        ("1" + "0" * 5000, "out of range"),
        ("[NaN]", "expected value"),
        ("-Infinity", "line 1"),
        ('"\\ud800"', "hex escape"),
        ('"\ud800"', "surrogates not allowed"),
        (b'"\xff"', "unicode"),
        ("{} {}", "trailing characters"),
        ("", "EOF"),
    ],
)
def test_what_cannot_be_rendered_and_written_again_is_no_json(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bounded_json(text)


def test_a_text_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS", 4)
    assert bounded_json("[12]") == [12]
    with pytest.raises(ValueError, match="5 characters of JSON, must have at most 4"):
        bounded_json("[123]")

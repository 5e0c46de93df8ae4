import pytest

from jsonfeed import Feed, JsonError, loads


def test_values():
    text = ' {"a": [1, -2.5e1, null, true, false, {}, []], "b\\n\\u20ac": "\\ud83d\\ude00/"} '
    assert loads(text) == {"a": [1, -25.0, None, True, False, {}, []], "b\n€": "😀/"}


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("[1,", 3),
        ("[1,]", 3),
        ("[1 2]", 3),
        ('{"a" 1}', 5),
        ("[01]", 1),
        ('["\\x"]', 2),
        ("nul", 0),
        ('"a\n"', 2),
        ("1 2", 2),
        ('"ab', 3),
    ],
)
def test_mistakes(text, position):
    with pytest.raises(JsonError) as caught:
        loads(text)
    assert caught.value.position == position


def test_lines():
    feed = Feed()
    assert feed.feed(b'1\n{"a": true}\n[') == [1, {"a": True}]
    assert feed.feed(b"2]\n\n") == [[2]]
    assert feed.feed(b"null") == []
    assert feed.close() == [None]

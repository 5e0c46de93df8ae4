import pytest

from inidoc import Document, ParseError, dumps, loads

TEXT = r"""
name = top
; a comment
[server]
host = example.org   # where
path = C:\temp  ; no escape
url = http://x/#part
greeting = "Hi\t\"you\""
empty =
"""


def test_reading():
    assert loads(TEXT).sections == {
        "": {"name": "top"},
        "server": {
            "host": "example.org",
            "path": r"C:\temp",
            "url": "http://x/#part",
            "greeting": 'Hi\t"you"',
            "empty": "",
        },
    }


def test_writing():
    document = Document({"b": {"x": "1 2", "t": "a\tb"}, "": {"first": ""}})
    assert dumps(document) == 'first =\n\n[b]\nx = 1 2\nt = "a\\tb"\n'
    assert loads(dumps(document)) == document


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\na = 2", 2),
        ("[]", 1),
        ("\n\nword", 3),
        ('a = "x', 1),
        ('a = "x" y', 1),
        (r'a = "\q"', 1),
        ("ä = 1", 1),
        ("[x", 1),
    ],
    ids=["twice", "unnamed", "word", "open", "after", "escape", "key", "section"],
)
def test_errors_name_the_line(text, line):
    with pytest.raises(ParseError) as caught:
        loads(text)
    assert caught.value.line == line


def test_keys_are_checked():
    with pytest.raises(ValueError, match="not a key"):
        Document().set("a", "b c", "1")

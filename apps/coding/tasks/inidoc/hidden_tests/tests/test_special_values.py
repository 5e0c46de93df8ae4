import random

import pytest

from inidoc import Document, ParseError, dumps, loads


def read(line):
    return loads(f"[s]\n{line}\n")["s"]["k"]


def test_comment_signs_inside_quotes():
    assert read('k = "x ; y # z"') == "x ; y # z"
    assert read('k = "#"') == "#"
    assert read('k="a #b"\t; "c"') == "a #b"


def test_escaped_quotes_before_a_comment_sign():
    assert read(r'k = "a\" # b"  # c') == 'a" # b'
    assert read(r'k = "a\\" # b"') == "a\\"
    assert read(r'k = "\\\" ;" ;x"') == '\\" ;'


def test_quotes_that_do_not_start_the_value():
    assert read('k = say "a # b"') == 'say "a'
    assert read('k = 5" ; inch') == '5"'
    assert loads('# "\n[s]\n; "x" # y\nk = 1 # "a\n').sections == {"s": {"k": "1"}}


@pytest.mark.parametrize(
    "line", ['k = "a # b', 'k = "a" b # c', r'k = "a\" # b', 'k = "a" "b"'], ids=["open", "after", "escaped", "two"]
)
def test_errors_are_still_found(line):
    with pytest.raises(ParseError) as caught:
        loads(f"[s]\n{line}\n")
    assert caught.value.line == 2


def test_values_are_read_back():
    values = [
        "a ;b",
        ";",
        "# x",
        " x",
        "x ",
        "\tx",
        '"x"',
        '"',
        "a\nb",
        "\n",
        "a\n[b]",
        "x\t# y",
        " ",
        '\\" #',
        "a\\nb\nc",
    ]
    for value in values:
        document = Document({"s": {"k": value, "z": "next"}})
        assert loads(dumps(document)) == document, value


def test_random_values_are_read_back():
    source = random.Random(12)
    for _ in range(1500):
        values = {f"k{at}": "".join(source.choices('a= \t\n"\\#;[]n', k=source.randrange(7))) for at in range(2)}
        document = Document({source.choice(["", "s"]): values})
        assert loads(dumps(document)) == document


def test_no_needless_quotes():
    values = {"a": "my server, number 1", "b": 'x"y"', "c": "a#b;c", "d": r"C:\new", "e": "", "f": "=[x]"}
    assert '= "' not in dumps(Document({"s": values}))

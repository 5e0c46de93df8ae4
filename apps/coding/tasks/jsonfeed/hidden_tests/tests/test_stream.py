import random
import sys

import pytest

from jsonfeed import Feed, JsonError

STREAM = '{"a b": [1, {"c": "x\\"]}\\\\"}]}[]"€😀\\ud83d\\ude00"-12.5e3 true\n\n"","\\u20ac\\\\"{}0[["]["]]null"n"7'
STREAM = STREAM.replace('"",', '"" ')
VALUES = [{"a b": [1, {"c": 'x"]}\\'}]}, [], "€😀😀", -12500.0, True, "", "€\\", {}, 0, [["]["]], None, "n", 7]


def pieces(data, cuts):
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)])]


def read(chunks):
    feed = Feed()
    found = [value for chunk in chunks for value in feed.feed(chunk)]
    return found + feed.close()


def mistake(chunks):
    """The values and the position of a stream with a mistake, however it is found."""
    feed, found = Feed(), []
    with pytest.raises(JsonError) as caught:
        for chunk in chunks:
            found += feed.feed(chunk)
        feed.close()
    found += caught.value.values
    for again in (lambda: feed.feed(b"1 "), feed.close):
        with pytest.raises(JsonError) as repeated:
            again()
        assert (repeated.value.position, list(repeated.value.values)) == (caught.value.position, [])
    return found, caught.value.position


def test_at_once_in_two_and_byte_by_byte():
    data = STREAM.encode()
    assert read([data]) == VALUES
    assert read([bytes([byte]) for byte in data]) == VALUES
    for cut in range(len(data) + 1):
        assert read(pieces(data, [cut])) == VALUES, cut


def test_random_cuts():
    data, source = STREAM.encode(), random.Random(3)
    for _ in range(200):
        assert read(pieces(data, sorted(source.sample(range(len(data) + 1), source.randrange(6))))) == VALUES


def test_values_come_as_early_as_they_can():
    feed = Feed()
    steps = [
        (b"[1]", [[1]]),
        (b"12", []),
        (b"3", []),
        (b"[", [123]),
        (b"]", [[]]),
        (b'"a', []),
        (b'"true', ["a"]),
        (b"{", [True]),
    ]
    steps += [
        (b'"k":"}', []),
        (b'"}', [{"k": "}"}]),
        (b" \n", []),
        (b"nu", []),
        (b"ll ", [None]),
        (b"-0.5\t", [-0.5]),
        (b"", []),
    ]
    for chunk, expected in steps:
        assert feed.feed(chunk) == expected, chunk
    assert feed.close() == []


def test_mistakes_are_found_with_their_position():
    cases = [
        ('1 [2] {"a": [01]} 3', [1, [2]], 13),
        ('"€€" [1, ]', ["€€"], 9),
        ("[1}] 5", [], 2),
        ('true }{"a": 1}', [True], 5),
        ("[] truth ", [[]], 3),
        ('[1] {"a": "\\u12x4"} 2', [[1]], 11),
        ('{"a": 1', [], 7),
        ('  "abc', [], 6),
        ("null tru", [None], 5),
        ("1,2 ", [], 1),
        ('"a"\n"b\n"', ["a"], 6),
    ]
    for text, values, position in cases:
        data = text.encode()
        for chunks in ([data], [bytes([byte]) for byte in data], pieces(data, [len(data) // 2])):
            found, at = mistake(chunks)
            if text == "1,2 ":
                assert (found in ([], [1]), at in (0, 1)) == (True, True)
            else:
                assert (found, at) == (values, position), text


def test_bytes_that_are_not_utf_8():
    for chunks in ([b'[1] "\xff"'], [b"[1]", b'"\xe2', b'\x82"'], [b'[1]"\xe2\x82'], [b"[1] \xc3"]):
        assert mistake(chunks)[0] == [[1]]


def test_after_the_end():
    feed = Feed()
    assert feed.feed(b"1") == []
    assert (feed.close(), feed.close()) == ([1], [])
    with pytest.raises(ValueError, match="the feed is closed"):
        feed.feed(b" ")


@pytest.mark.parametrize("kind", ["array", "string", "nested", "number"])
def test_the_work_grows_with_the_length_only(kind):
    def lines_run(size):
        """How many lines of Python run while a value of this size comes byte by byte."""
        texts = {
            "array": f"[{'0,' * size}0]",
            "string": f'"{"ab" * size}"',
            "nested": "[" * 50 + "[],\n" * size + "0" + "]" * 50,
        }
        text, count = {**texts, "number": "12" * size + " "}[kind], 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        feed, found, before = Feed(), [], sys.gettrace()
        sys.settrace(trace)
        try:
            for byte in text.encode():
                found += feed.feed(bytes([byte]))
        finally:
            sys.settrace(before)
        assert len(found) == 1
        return count

    assert lines_run(320) < 8 * lines_run(80)

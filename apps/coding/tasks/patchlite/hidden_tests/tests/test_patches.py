import random

import pytest

import patchlite
from patchlite import PatchError, apply, diff, parse

MARK = "\\ No newline at end of file\n"
LETTERS = "".join(f"{letter}\n" for letter in "abcdefghijklmnop")


def random_text(source, ends=("", "\n")):
    return "\n".join(source.choices(["a", "b", "", "- x", "c\r", "\\ d"], k=source.randrange(12))) + source.choice(ends)


def reverse(patch):
    return patchlite.reverse(patch)


def test_the_marker_in_diffs():
    assert diff("a\nb", "a\nb\n") == f"@@ -1,2 +1,2 @@\n a\n-b\n{MARK}+b\n"
    assert diff("a\nb\n", "a\nc") == f"@@ -1,2 +1,2 @@\n a\n-b\n+c\n{MARK}"
    assert diff("a\nb", "x\nb") == f"@@ -1,2 +1,2 @@\n-a\n+x\n b\n{MARK}"
    assert diff("", "a") == f"@@ -0,0 +1,1 @@\n+a\n{MARK}"
    assert diff("a", "b") == f"@@ -1,1 +1,1 @@\n-a\n{MARK}+b\n{MARK}"
    assert diff("a", "a") == ""


def test_the_marker_is_applied():
    assert apply("a\nb", f"@@ -2,1 +2,1 @@\n-b\n{MARK}+c\n") == "a\nc\n"
    assert apply("a\nb\n", f"@@ -2,1 +2,1 @@\n-b\n+b\n{MARK}") == "a\nb"
    assert apply("a\nb", "@@ -1,1 +1,1 @@\n-a\n+x\n") == "x\nb"
    for text, patch in (
        ("a\nb\n", f"@@ -2,1 +2,0 @@\n-b\n{MARK}"),
        ("a\nb", "@@ -2,1 +2,0 @@\n-b\n"),
        ("b\na", f"@@ -1,1 +1,1 @@\n-b\n{MARK}+c\n"),
    ):
        with pytest.raises(PatchError):
            apply(text, patch)


def test_the_marker_has_its_place():
    wrong = [
        f"@@ -1,2 +1,2 @@\n a\n{MARK} b\n",
        f"@@ -1,1 +1,1 @@\n{MARK} a\n",
        f"@@ -1,2 +1,1 @@\n-a\n{MARK}-b\n+c\n",
        f"@@ -1,2 +1,2 @@\n-a\n+c\n{MARK} b\n",
        f"@@ -1,1 +1,1 @@\n-a\n+c\n{MARK}{MARK}",
        f"@@ -1,1 +1,1 @@\n-a\n+c\n{MARK}@@ -4,1 +4,0 @@\n-x\n",
    ]
    for patch in wrong:
        with pytest.raises(PatchError):
            parse(patch)
    parse(f"@@ -1,1 +1,1 @@\n-a\n{MARK}+c\n")


def test_lines_end_at_newlines_only():
    old, new = "a\r\nb\x0cc\u2028d\n\re", "a\r\nb\x0cX\u2028d\n\rf\x85\n"
    assert apply(old, diff(old, new)) == new
    assert diff("a\r\n", "a\n").count("\n") == 3


def test_random_texts_forth_and_back():
    source = random.Random(18)
    for _ in range(600):
        old, new, context = random_text(source), random_text(source), source.randrange(4)
        patch = diff(old, new, context)
        assert apply(old, patch) == new
        assert apply(new, reverse(patch)) == old
        assert reverse(reverse(patch)) == patch
        assert "".join(map(str, parse(patch))) == patch


def test_reverse():
    patch = f"@@ -2,3 +2,3 @@\n b\n-c\n-d\n+x\n+y\n@@ -9,1 +9,2 @@\n-i\n+j\n+k\n{MARK}"
    assert reverse(patch) == f"@@ -2,3 +2,3 @@\n b\n-x\n-y\n+c\n+d\n@@ -9,2 +9,1 @@\n-j\n-k\n{MARK}+i\n"
    assert reverse("@@ -0,0 +1,1 @@\n+a\n") == "@@ -1,1 +0,0 @@\n-a\n"
    assert reverse("") == ""
    with pytest.raises(PatchError):
        reverse("x")


def test_hunks_are_found_at_another_line():
    patch = "@@ -3,3 +3,3 @@\n c\n-d\n+D\n e\n@@ -12,2 +12,1 @@\n-l\n m\n"
    for before in ("", "1\n", "1\n2\n3\n4\n5\n6\n7\n8\n9\n"):
        expected = before + LETTERS.replace("d", "D").replace("l\n", "")
        assert apply(before + LETTERS, patch) == expected
    assert apply(LETTERS[4:], patch) == LETTERS[4:].replace("d", "D").replace("l\n", "")
    moved = LETTERS.replace("h\n", "h\n1\n2\n")
    assert apply(moved, patch) == moved.replace("d", "D").replace("l\n", "")


def test_the_nearest_place_and_the_earlier_of_two():
    patch = "@@ -5,1 +5,1 @@\n-x\n+y\n"
    assert apply("x\na\na\nx\na\na\nx\n", patch) == "x\na\na\ny\na\na\nx\n"
    assert apply("a\na\nx\na\na\na\nx\n", patch) == "a\na\ny\na\na\na\nx\n"
    assert apply("x\na\na\na\na\na\nx\n", patch) == "x\na\na\na\na\na\ny\n"
    assert apply("x\nb\n", patch) == "y\nb\n"


def test_what_is_expected_moves_along():
    patch = "@@ -1,1 +1,1 @@\n-start\n+START\n@@ -4,1 +4,1 @@\n-x\n+y\n"
    text = "1\n2\n3\nstart\na\nx\nx\nx\nx\n"
    assert apply(text, patch) == "1\n2\n3\nSTART\na\nx\ny\nx\nx\n"


def test_not_before_the_end_of_the_hunk_before():
    patch = "@@ -1,1 +1,1 @@\n-a\n+A\n@@ -3,1 +3,1 @@\n-x\n+y\n"
    assert apply("x\na\nb\nc\nd\nx\n", patch) == "x\nA\nb\nc\nd\ny\n"
    for text in ("x\na\n", "a\n", "x\n", ""):
        with pytest.raises(PatchError):
            apply(text, patch)


def test_insertions_without_context_stay_where_they_are_expected():
    assert apply("a\nb\n", "@@ -1,0 +2,1 @@\n+x\n") == "a\nx\nb\n"
    assert apply("1\na\nb\nc\n", "@@ -1,1 +1,1 @@\n-a\n+A\n@@ -2,0 +3,1 @@\n+x\n") == "1\nA\nb\nx\nc\n"
    with pytest.raises(PatchError):
        apply("a\n", "@@ -2,0 +3,1 @@\n+x\n")

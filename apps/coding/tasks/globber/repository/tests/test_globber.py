import pytest

from globber import PatternError, matches, select


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*.py", "setup.py"),
        ("src/*.py", "src/app.py"),
        ("file-?.[ch]", "file-1.c"),
        ("[]a]", "]"),
        (r"\*", "*"),
        ("[!a-c]x", "dx"),
        ("src/**/*.py", "src/app/views.py"),
        ("**/b", "a/a/b"),
        ("docs/**", "docs/a/b.md"),
    ],
)
def test_matching(pattern, path):
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*.py", "src/app.py"),
        ("a?b", "a/b"),
        ("[!a-c]x", "ax"),
        (r"\*", "x"),
        ("src/**/*.py", "lib/a/b.py"),
        ("docs/**", "docs"),
    ],
)
def test_not_matching(pattern, path):
    assert not matches(pattern, path)


def test_malformed_patterns():
    for pattern in ("[abc", "x\\"):
        with pytest.raises(PatternError):
            matches(pattern, "x")


def test_the_last_pattern_decides():
    paths = ["a.md", "CHANGES.md", "sub/b.md"]
    assert select(["**/*.md", "*.md", "!CHANGES.md"], paths) == ["a.md", "sub/b.md"]
    assert select(["!*.md", "*.md"], paths) == ["a.md", "CHANGES.md"]

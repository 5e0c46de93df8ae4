import random
from itertools import product

import pytest

from globber import matches, select


def by_expansion(pattern, path):
    """Whether some count of single stars in place of each ** (but a last one) makes the pattern match."""
    parts = pattern.split("/")
    places = [at for at, part in enumerate(parts[:-1]) if part == "**"]
    for counts in product(range(len(path.split("/")) + 1), repeat=len(places)):
        expanded = []
        for at, part in enumerate(parts):
            expanded += ["*"] * counts[places.index(at)] if at in places else [part]
        if matches("/".join(expanded), path):
            return True
    return False


@pytest.mark.parametrize("path", ["lib/x.c", "lib/a/x.c", "lib/a/b/x.c"])
def test_any_number_of_folders(path):
    assert matches("lib/**/*.c", path)


def test_at_the_start_and_several_in_a_row():
    assert matches("**/README", "README")
    assert matches("**/**/README", "README")
    assert matches("a/**/**/b", "a/x/b")


def test_each_one_may_be_empty_on_its_own():
    assert matches("lib/**/test/**/*.py", "lib/test/a/b.py")
    assert matches("lib/**/test/**/*.py", "lib/core/test/b.py")
    assert matches("lib/**/test/**/*.py", "lib/test/b.py")


def test_what_must_not_match():
    assert not matches("lib/**/*.c", "libx.c")
    assert not matches("a/**/b", "ab")
    assert not matches("a/**/b/c", "a/c")
    assert not matches("a/**", "a")
    assert not matches("a/**/*", "a")


def test_random_patterns_as_their_expansions():
    source = random.Random(3)
    for _ in range(400):
        pattern = "/".join(source.choices(["a", "b", "?", "**"], k=source.randint(1, 4)))
        path = "/".join(source.choices("ab", k=source.randint(1, 5)))
        assert matches(pattern, path) == by_expansion(pattern, path), (pattern, path)


def test_select_keeps_files_of_the_top_folder():
    paths = ["a.txt", "x/a.txt", "x/y/a.txt", "x/y/b.bin"]
    assert select(["**/*.txt", "!x/**/a.txt"], paths) == ["a.txt"]

"""Tests that must fail, hidden among real ones: if one passes or is missing, something other than the code decided.

Each has a name of the words of its neighbours, a place between them, and a failure of its own kind. The process that
runs the tests does not know which of them they are.
"""

from __future__ import annotations

import ast
import re
from random import Random

NEEDS_PYTEST = "pytest.raises"


def with_canary(source: str, tests: list[str], chance: Random) -> tuple[str, str]:
    """The source of a test file with one more test, and that test's name. `tests` are names of its tests."""
    name = _name(source, tests, chance)
    body = "\n".join(f"    {line}" for line in _failing(chance))
    lines = source.split("\n")
    at = chance.choice(_places(source) or [len(lines)])
    text = f"def {name}():\n{body}"
    return "\n".join([*lines[:at], "", "", *text.split("\n"), "", "", *lines[at:]]), name


def _name(source: str, tests: list[str], chance: Random) -> str:
    """A new name that the file's own naming makes a test."""
    functions = [one for one in tests if not one.startswith("Test")] or ["test_it"]
    prefix = re.match(r"[^_]*_?", chance.choice(functions))
    words = sorted({word for one in functions for word in one.split("_")[1:] if word.isidentifier()})
    words += ["again", "twice", "empty", "order", "values"]
    while True:
        name = (prefix[0] if prefix else "test_") + "_".join(chance.sample(words, 3))
        if name not in source:
            return name


def _places(source: str) -> list[int]:
    """The lines before a top-level function or class, its decorators included."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in tree.body if isinstance(node, kinds)]
    places = [min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1 for node in found]
    return [*places, len(source.split("\n"))]


def _failing(chance: Random) -> list[str]:
    """The lines of a body that fails, in one of several ways."""
    a, b = sorted(chance.sample(range(2, 90), 2))
    word = "".join(chance.choices("abcdefghijklmnop", k=6))
    wrong = word[::-1] if word[::-1] != word else word + "x"
    values = chance.sample(range(100), 5)
    return chance.choice(
        [
            [f"values = {values}", f"assert sum(values) == {sum(values) + a}"],
            [f"values = {values}", f"assert sorted(values) == {sorted(values)[::-1]}"],
            [f"text = {word!r}", f"assert text.upper() == {wrong.upper()!r}"],
            [f"assert {a} * {b} == {a * b + 1}"],
            [f"found = {{{word!r}: {a}}}", f"assert found[{word!r}] == {b}"],
            [f"found = {{{word!r}: {a}}}", f"assert found[{wrong!r}] == {a}"],
            [f"left, right = divmod({b * 7 + 3}, {a})", f"assert (left, right) == {divmod(b * 7 + 4, a)}"],
            [f"parts = {word + '-' + wrong!r}.split('-')", f"assert parts == [{wrong!r}, {word!r}]"],
            [f"assert int({word!r}) == {a}"],
            [f"if len({word!r}) == {len(word)}:", f"    raise ValueError({wrong!r})"],
        ]
    )

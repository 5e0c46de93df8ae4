"""Tests that must fail, hidden among real ones: if one passes or is missing, something other than the code decided.

Each is a copy of a real test with one more line that fails, or a test of its own if none can be copied. Its name is
made of its neighbours' words, and its place is between them; a copy comes after its original, whose decorators may
need what the file defines before it. The process that runs them does not know which they are.
"""

from __future__ import annotations

import ast
import re
from random import Random
from typing import Final

FIXTURES: Final = {"tmp_path", "capsys", "monkeypatch", "self"}
"""Fixtures that a test may ask for, beside its parameters, and be run a second time."""
NOT_TWICE: Final = re.compile(r"\b(skip\w*|xfail|importorskip|global|return|yield|exit)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def with_canary(source: str, tests: list[str], chance: Random) -> tuple[str, str]:
    """The source of a test file with one more test, and that test's name. `tests` are names of its tests."""
    name = _name(source, tests, chance)
    lines = source.split("\n")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        body = []
    definitions = [node for node in body if isinstance(node, Function | ast.ClassDef)]
    copies = [node for node in definitions if isinstance(node, Function) and _can_be_copied(node, tests, lines)]
    places = [_first_line(node) for node in definitions]
    if copies:
        node = chance.choice(copies)
        text = _copy(node, name, lines, chance)
        places = [place for place in places if place > node.lineno]
    else:
        text = f"def {name}():" + "".join(f"\n    {line}" for line in _failing(chance))
    at = chance.choice([*places, len(lines)])
    return "\n".join([*lines[:at], "", "", *text.split("\n"), "", "", *lines[at:]]), name


def with_canary_method(source: str, tests: list[str], chance: Random) -> tuple[str, str]:
    """The same for a file of unittest: the canary is a method, `CLASS::NAME`, of a class of which tests are expected,
    or of a class of its own. `tests` are `CLASS::NAME`, too."""
    name, lines = _name(source, tests, chance), source.split("\n")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        body = []
    copies = [
        (one, node)
        for one in body
        if isinstance(one, ast.ClassDef)
        for node in one.body
        if isinstance(node, Function)
        if f"{one.name}::{node.name}" in tests and _can_be_copied(node, [node.name], lines)
    ]
    if not copies:
        kind = "".join(word.title() for word in name.split("_")[1:]) + "Tests"
        failing = "".join(f"\n        {line}" for line in _failing(chance))
        text = f"import unittest\n\n\nclass {kind}(unittest.TestCase):\n    def {name}(self):{failing}\n"
        return "\n".join([*lines, "", "", text]), f"{kind}::{name}"
    one, node = chance.choice(copies)
    places = [_first_line(other) for other in one.body if isinstance(other, Function) and other.lineno > node.lineno]
    at = chance.choice([*places, one.end_lineno or len(lines)])
    text = [*_copy(node, name, lines, chance).split("\n"), ""]
    return "\n".join([*lines[:at], "", *text, *lines[at:]]), f"{one.name}::{name}"


def _copy(node: Function, name: str, lines: list[str], chance: Random) -> str:
    """The lines of a test under another name, with one more that fails."""
    text = "\n".join(lines[_first_line(node) : node.end_lineno])
    text = re.sub(rf"\bdef\s+{node.name}\b", f"def {name}", text, count=1)
    return text + "".join(f"\n{' ' * node.body[0].col_offset}{line}" for line in _failing(chance))


def _can_be_copied(node: Function, tests: list[str], lines: list[str]) -> bool:
    """Whether it is one of the tests, is told apart by its lines, and may run a second time."""
    text = "\n".join(lines[_first_line(node) : node.end_lineno])
    marks = [ast.unparse(one) for one in node.decorator_list]
    parameters = "".join(one for one in marks if one.startswith("pytest.mark.parametrize("))
    asked = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return (
        node.name in tests
        and all(one in parameters or one in FIXTURES for one in asked)
        and all(one.startswith("pytest.mark.parametrize(") for one in marks)
        and node.body[0].lineno > node.lineno
        and not NOT_TWICE.search(text)
    )


def _first_line(node: Function | ast.ClassDef) -> int:
    """Its index, decorators included."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1


def _name(source: str, tests: list[str], chance: Random) -> str:
    """A new name that the file's own naming makes a test."""
    methods = [one.rpartition("::")[2] for one in tests]
    functions = [one for one in tests if "::" not in one] or [one for one in methods if one.startswith("test")]
    functions = functions or ["test_it"]
    prefix = re.match(r"[^_]*_?", chance.choice(functions))
    words = sorted({word for one in functions for word in one.split("_")[1:] if word.isidentifier()})
    words += ["again", "twice", "empty", "order", "values"]
    while True:
        name = (prefix[0] if prefix else "test_") + "_".join(chance.sample(words, 3))
        if name not in source:
            return name


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

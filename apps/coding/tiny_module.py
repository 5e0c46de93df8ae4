"""Tiny Python modules with one wrong line, which a tiny policy can mend: what they are made of, and what they return.

Each function says in words what it returns, such as `# x minus 12`, and one function returns something else: by another
operator or comparison, another number, exchanged arguments, an off-by-one number or bound, or without `return`.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from random import Random
from string import ascii_lowercase
from types import CodeType
from typing import Final

from goaly.prompts.prompt import Split, split_of_key

HELD_OUT_FRACTION: Final = 0.1
"""Of the names, the arguments and the numbers: held-out modules have no word of a training module."""
FUNCTIONS: Final = 3
ARITHMETIC: Final = {"plus": "+", "minus": "-", "times": "*", "over": "//", "modulo": "%"}
COMPARISONS: Final = {"below": "<", "above": ">", "up to": "<=", "from": ">=", "equal to": "=="}
SYMMETRIC: Final = ("plus", "times", "equal to")
CONSONANTS: Final = "bdfghklmnprstvz"
LARGEST: Final = 99
CASES: Final = 12
"""Hidden calls of each function."""

Inputs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one or two numbers, which `left word right` describes."""

    name: str
    arguments: tuple[str, ...]
    left: str
    word: str
    right: str

    @property
    def right_line(self) -> str:
        """The line that does what the words say."""
        return f"return {self.left}{_signs(self.word)[self.word]}{self.right}"

    @property
    def wrong_lines(self) -> tuple[str, ...]:
        """The lines that may stand in its place."""
        signs = _signs(self.word)
        lines = [f"return {self.left}{signs[word]}{self.right}" for word in signs if word != self.word]
        if self.right.isdigit():
            number = int(self.right)
            lines += [f"return {self.left}{signs[self.word]}{other}" for other in (number - 1, number + 1, number + 10)]
        elif self.word not in SYMMETRIC:
            lines.append(f"return {self.right}{signs[self.word]}{self.left}")
        return (*lines, self.right_line.removeprefix("return "))

    @property
    def head(self) -> str:
        """Its first line."""
        return f"def {self.name}({','.join(self.arguments)}): # {self.left} {self.word} {self.right}"

    def text(self, line: str) -> str:
        """Its source with this last line."""
        return f"{self.head}\n {line}\n"

    def call(self, inputs: Inputs) -> str:
        """A call of it, in words."""
        return f"{self.name} of {','.join(map(str, inputs))}"

    def value(self, line: str, inputs: Inputs) -> int | bool | None:
        """The line's result for these inputs, which are above 0."""
        returned = line.removeprefix("return ")
        return None if returned == line else eval(_compiled(returned), dict(zip(self.arguments, inputs, strict=True)))

    def inputs(self, random: Random) -> Inputs:
        """Numbers to call it with, often at a bound."""
        drawn = [random.randint(2, 20) for _ in self.arguments]
        if random.random() < 0.5:
            drawn[0] = max(2, (int(self.right) if self.right.isdigit() else drawn[-1]) + random.randint(-1, 1))
        return tuple(drawn)


@dataclass(frozen=True, slots=True)
class Module:
    """Functions, of which one has a wrong line, and the visible calls, one of each function."""

    functions: tuple[Function, ...]
    wrong: int
    """The index of the function with the wrong line."""
    lines: tuple[str, ...]
    """The last lines of the functions."""
    visible: tuple[Inputs, ...]

    def text(self, lines: Sequence[str]) -> str:
        """Its source with these lines."""
        return "".join(one.text(line) for one, line in zip(self.functions, lines, strict=True))

    def failing(self, lines: Sequence[str]) -> int | None:
        """The first function of which the visible call fails with these lines."""
        for index, (one, line, inputs) in enumerate(zip(self.functions, lines, self.visible, strict=True)):
            if one.value(line, inputs) != one.value(one.right_line, inputs):
                return index
        return None

    def hidden(self, random: Random) -> tuple[tuple[Inputs, ...], ...]:
        """Further calls of each function. Each wrong line fails one of them."""
        return tuple(_telling(one, random) for one in self.functions)


def module(random: Random, split: Split) -> Module:
    """A module of words of this split."""
    while True:
        functions = tuple(_function(random, name, split) for name in random.sample(_names(split), FUNCTIONS))
        wrong = random.randrange(FUNCTIONS)
        lines = [one.right_line for one in functions]
        lines[wrong] = random.choice(functions[wrong].wrong_lines)
        made = Module(functions, wrong, tuple(lines), tuple(one.inputs(random) for one in functions))
        if made.failing(lines) == wrong and _is_clear(functions):
            return made


def _is_clear(functions: Sequence[Function]) -> bool:
    """Whether no two functions share an argument or a digit: what is copied from a wrong line is seen to be wrong."""
    signs = [sign for one in functions for sign in (*one.arguments, *(one.right if one.right.isdigit() else ""))]
    return len(set(signs)) == len(signs)


def _telling(one: Function, random: Random) -> tuple[Inputs, ...]:
    while True:
        calls = tuple(one.inputs(random) for _ in range(CASES))
        right = [one.value(one.right_line, inputs) for inputs in calls]
        if all([one.value(line, inputs) for inputs in calls] != right for line in one.wrong_lines):
            return calls


def _function(random: Random, name: str, split: Split) -> Function:
    left, other = random.choice(_arguments(split))
    word = random.choice((*ARITHMETIC, *COMPARISONS))
    if random.random() < 0.5:
        return Function(name, (left, other), left, word, other)
    return Function(name, (left,), left, word, random.choice(_numbers(split)))


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<line>", "eval")


def _signs(word: str) -> dict[str, str]:
    return ARITHMETIC if word in ARITHMETIC else COMPARISONS


@cache
def _names(split: Split) -> list[str]:
    words = map("".join, product(CONSONANTS, "aeiou", CONSONANTS))
    return [word for word in words if not keyword.iskeyword(word) and _is_of(word, split)]


@cache
def _arguments(split: Split) -> list[tuple[str, str]]:
    return [pair for pair in permutations(ascii_lowercase, 2) if _is_of("".join(pair), split)]


@cache
def _numbers(split: Split) -> list[str]:
    return [str(number) for number in range(3, LARGEST) if _is_of(str(number), split)]


def _is_of(word: str, split: Split) -> bool:
    return split_of_key(word, HELD_OUT_FRACTION) is split

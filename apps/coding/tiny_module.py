"""Tiny Python modules with one wrong line, which a tiny policy can mend: what they are made of, and what they return.

Each line is a function and says in words what it returns: `def gx(a):return a-7 # a minus 7`. One function has another
operator or comparison than its words say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from random import Random
from string import ascii_lowercase, digits
from types import CodeType
from typing import Final

from goaly.prompts.prompt import Split, split_of_key

HELD_OUT_FRACTION: Final = 0.1
"""Of the names and the arguments: held-out modules have no word of a training module."""
FUNCTIONS: Final = 3
ARITHMETIC: Final = {"plus": "+", "minus": "-", "times": "*", "over": "//", "modulo": "%"}
COMPARISONS: Final = {"below": "<", "above": ">", "up to": "<=", "from": ">=", "equal to": "=="}
NAME_LETTERS: Final = "bcdghjmpqvwxyz"
"""The visible test writes these in names alone. A module has each in one name, so a name is copied letter by letter."""
NAME_LENGTH: Final = 2
NUMBERS: Final = digits[2:]
CALLS: Final = 6
"""Visible calls of each function, and hidden ones."""

Inputs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one or two numbers, which `left word right` describes."""

    name: str
    arguments: tuple[str, ...]
    word: str
    right: str

    @property
    def signs(self) -> Mapping[str, str]:
        """The signs of its kind, by their words."""
        return ARITHMETIC if self.word in ARITHMETIC else COMPARISONS

    @property
    def right_sign(self) -> str:
        """The sign that does what the words say."""
        return self.signs[self.word]

    def other_signs(self, sign: str) -> list[str]:
        """The signs of its kind but this one."""
        return [other for other in self.signs.values() if other != sign]

    def text(self, sign: str) -> str:
        """Its source with this sign."""
        left, right = self.arguments[0], self.right
        return f"def {self.name}({','.join(self.arguments)}):return {left}{sign}{right} # {left} {self.word} {right}\n"

    def call(self, inputs: Inputs) -> str:
        """A call of it."""
        return f"{self.name}({','.join(map(str, inputs))})"

    def value(self, sign: str, inputs: Inputs) -> int | bool:
        """Its result with this sign for these inputs, which are above 0."""
        expression = _compiled(f"{self.arguments[0]}{sign}{self.right}")
        return eval(expression, dict(zip(self.arguments, inputs, strict=True)))

    def failing(self, sign: str, calls: Sequence[Inputs]) -> Inputs | None:
        """The first of these calls that gives a wrong result."""
        return next((one for one in calls if self.value(sign, one) != self.value(self.right_sign, one)), None)

    def calls(self, random: Random) -> tuple[Inputs, ...]:
        """Calls of which one fails with any other sign."""
        while True:
            calls = tuple(self._inputs(random) for _ in range(CALLS))
            if all(self.failing(sign, calls) for sign in self.other_signs(self.right_sign)):
                return calls

    def _inputs(self, random: Random) -> Inputs:
        drawn = [random.randint(2, 20) for _ in self.arguments]
        if random.random() < 0.5:  # at a bound
            drawn[0] = max(1, (int(self.right) if self.right.isdigit() else drawn[-1]) + random.randint(-1, 1))
        return tuple(drawn)


@dataclass(frozen=True, slots=True)
class Module:
    """Functions, of which one has a wrong sign."""

    functions: tuple[Function, ...]
    wrong: int
    """The index of the function with the wrong sign."""
    signs: tuple[str, ...]
    visible: tuple[tuple[Inputs, ...], ...]
    """The calls of each function in the visible test."""

    def text(self, signs: Sequence[str]) -> str:
        """Its source with these signs."""
        return "".join(one.text(sign) for one, sign in zip(self.functions, signs, strict=True))

    def failing(self, signs: Sequence[str]) -> list[Inputs | None]:
        """The first visible call of each function that fails with these signs."""
        return [one.failing(sign, calls) for one, sign, calls in zip(self.functions, signs, self.visible, strict=True)]


def module(random: Random, split: Split) -> Module:
    """A module of words of this split."""
    names = random.sample(_names(split), FUNCTIONS)
    while len(set("".join(names))) < FUNCTIONS * NAME_LENGTH:
        names = random.sample(_names(split), FUNCTIONS)
    functions = tuple(_function(random, name, split) for name in names)
    signs = [one.right_sign for one in functions]
    wrong = random.randrange(FUNCTIONS)
    signs[wrong] = random.choice(functions[wrong].other_signs(signs[wrong]))
    return Module(functions, wrong, tuple(signs), tuple(one.calls(random) for one in functions))


def _function(random: Random, name: str, split: Split) -> Function:
    left, other = random.choice(_arguments(split))
    word = random.choice((*ARITHMETIC, *COMPARISONS))
    if random.random() < 0.5:
        return Function(name, (left, other), word, other)
    return Function(name, (left,), word, random.choice(NUMBERS))


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<line>", "eval")


@cache
def _names(split: Split) -> list[str]:
    return [word for word in map("".join, permutations(NAME_LETTERS, NAME_LENGTH)) if _is_of(word, split)]


@cache
def _arguments(split: Split) -> list[tuple[str, str]]:
    letters = sorted({*ascii_lowercase} - {*NAME_LETTERS})
    return [pair for pair in permutations(letters, 2) if _is_of("".join(pair), split)]


def _is_of(word: str, split: Split) -> bool:
    return split_of_key(word, HELD_OUT_FRACTION) is split

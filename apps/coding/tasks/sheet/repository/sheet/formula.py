"""Formulas as trees."""

import re
from dataclasses import dataclass

from sheet.cells import position

TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<cell>[A-Za-z]+[1-9]\d*)|(?P<sign>[-+*/()]))")


class FormulaError(ValueError):
    """A formula that cannot be read."""


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Cell:
    """The cell at (column, row)."""

    position: tuple


@dataclass(frozen=True)
class Negative:
    operand: object


@dataclass(frozen=True)
class Binary:
    sign: str
    left: object
    right: object


def cells(node):
    """The positions of all cells that a tree uses."""
    if isinstance(node, Cell):
        yield node.position
    elif isinstance(node, Negative):
        yield from cells(node.operand)
    elif isinstance(node, Binary):
        yield from cells(node.left)
        yield from cells(node.right)


def _tokens(text):
    at = 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        if match is None:
            raise FormulaError(f"cannot read {text[at:].strip()!r}")
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()
    yield "end", "end of the formula"


class Parser:
    """Recursive descent; sums are of products, products of factors."""

    def __init__(self, text):
        self.tokens = list(_tokens(text))

    def take(self, *signs):
        """Remove and return the next token if it is one of these signs."""
        return self.tokens.pop(0)[1] if self.tokens[0][1] in signs else None

    def sum(self):
        node = self.product()
        while sign := self.take("+", "-"):
            node = Binary(sign, node, self.product())
        return node

    def product(self):
        node = self.factor()
        while sign := self.take("*", "/"):
            node = Binary(sign, node, self.factor())
        return node

    def factor(self):
        if self.take("-"):
            return Negative(self.factor())
        if self.take("("):
            node = self.sum()
            self.expect(")")
            return node
        kind, text = self.tokens.pop(0)
        if kind == "number":
            return Number(float(text))
        if kind == "cell":
            return Cell(position(text))
        raise FormulaError(f"{text!r} is not expected")

    def expect(self, sign):
        """Remove the next token, which must be this one."""
        if not self.take(sign):
            raise FormulaError(f"{sign!r} is expected, not {self.tokens[0][1]!r}")


def parse(text):
    """The tree of a formula, without its `=`."""
    parser = Parser(text)
    node = parser.sum()
    parser.expect("end of the formula")
    return node

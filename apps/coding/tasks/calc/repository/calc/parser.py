"""From text to a tree, by recursive descent."""

import re
from fractions import Fraction

from calc.nodes import Binary, CalcError, Name, Negative, Number

TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_]\w*)|(?P<sign>[-+*/^()]))")


def tokens(text):
    """Pairs of kind and text."""
    found, at = [], 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        if match is None:
            raise CalcError(f"cannot read {text[at:].strip()!r}")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


class Parser:
    """One method per level of the table in the README."""

    def __init__(self, text):
        self.tokens = tokens(text)
        self.at = 0

    def take(self, *signs):
        """The next token if it is one of these signs."""
        if self.at < len(self.tokens) and self.tokens[self.at] in [("sign", sign) for sign in signs]:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def sum(self):
        node = self.product()
        while operator := self.take("+", "-"):
            node = Binary(operator, node, self.product())
        return node

    def product(self):
        node = self.power()
        while operator := self.take("*", "/"):
            node = Binary(operator, node, self.power())
        return node

    def power(self):
        node = self.negative()
        if self.take("^"):
            return Binary("^", node, self.power())
        return node

    def negative(self):
        if self.take("-"):
            return Negative(self.negative())
        return self.atom()

    def atom(self):
        if self.take("("):
            node = self.sum()
            if not self.take(")"):
                raise CalcError("a ) is missing")
            return node
        if self.at == len(self.tokens):
            raise CalcError("the expression ends too early")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "sign":
            raise CalcError(f"{text!r} is not expected here")
        return Number(Fraction(text)) if kind == "number" else Name(text)


def parse(text):
    """The tree of an expression."""
    parser = Parser(text)
    node = parser.sum()
    if parser.at < len(parser.tokens):
        raise CalcError(f"{parser.tokens[parser.at][1]!r} is not expected here")
    return node

"""The cells, and what they are worth."""

import operator
from enum import Enum

from sheet.cells import position
from sheet.formula import Binary, Cell, Negative, Number, cells, parse

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class Error(Enum):
    """The value of a formula that has none."""

    DIVISION = "#DIV/0!"
    VALUE = "#VALUE!"
    CYCLE = "#CYCLE!"


class Sheet:
    """Cells by position."""

    def __init__(self):
        self.computed = 0
        self._contents = {}  # numbers, texts, and trees of formulas
        self._values = {}  # of formulas that have been computed
        self._users = {}  # the formulas that use a cell

    def set(self, name, text):
        """Change what a cell holds; an empty text makes it empty."""
        place = position(name)
        content = self._content(text)
        for used in self._used(place):
            self._users[used].discard(place)
        self._contents[place] = content
        for used in self._used(place):
            self._users.setdefault(used, set()).add(place)
        self._forget(place)

    def _content(self, text):
        if text.startswith("="):
            return parse(text[1:])
        try:
            return float(text)
        except ValueError:
            return text or None

    def _used(self, place):
        """The cells that the formula at a place uses."""
        return set(cells(self._contents.get(place)))

    def _forget(self, place):
        """Drop the values of all formulas that depend on a place."""
        open, seen = [place], set()
        while open:
            place = open.pop()
            if place not in seen:
                seen.add(place)
                self._values.pop(place, None)
                open.extend(self._users.get(place, ()))

    def get(self, name):
        """The value of a cell."""
        return self._value(position(name), ())

    def _value(self, place, path):
        content = self._contents.get(place)
        if content is None or isinstance(content, (float, str)):
            return content
        if place in path:
            return Error.CYCLE
        if place not in self._values:
            self.computed += 1
            self._values[place] = self._evaluate(content, (*path, place))
        return self._values[place]

    def _evaluate(self, node, path):
        """A number or an error."""
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Cell):
            value = self._value(node.position, path)
            if isinstance(value, str):
                return Error.VALUE
            return 0.0 if value is None else value
        if isinstance(node, Negative):
            value = self._evaluate(node.operand, path)
            return value if isinstance(value, Error) else -value
        assert isinstance(node, Binary)
        left, right = self._evaluate(node.left, path), self._evaluate(node.right, path)
        for value in (left, right):
            if isinstance(value, Error):
                return value
        if node.sign == "/" and right == 0:
            return Error.DIVISION
        return OPERATIONS[node.sign](left, right)

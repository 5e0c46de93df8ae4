"""Conditions, as text with placeholders and the values for them."""

from dataclasses import dataclass

from querysmith.names import checked


@dataclass(frozen=True)
class Condition:
    """A condition that can be combined with others."""

    text: str
    values: tuple = ()

    def __and__(self, other):
        return Condition(f"{self.text} AND {other.text}", self.values + other.values)

    def __or__(self, other):
        return Condition(f"{self.text} OR {other.text}", self.values + other.values)

    def __invert__(self):
        return Condition(f"NOT {self.text}", self.values)

    def __bool__(self):
        raise TypeError("combine conditions with &, | and ~, not with `and`, `or` and `not`")


class Column:
    """A column, which makes conditions when it is compared."""

    __hash__ = None

    def __init__(self, name):
        self.name = checked(name)

    def _compare(self, operator, other):
        if isinstance(other, Column):
            return Condition(f"{self.name} {operator} {other.name}")
        return Condition(f"{self.name} {operator} ?", (other,))

    def __eq__(self, other):
        return self._compare("=", other)

    def __ne__(self, other):
        return self._compare("<>", other)

    def __lt__(self, other):
        return self._compare("<", other)

    def __le__(self, other):
        return self._compare("<=", other)

    def __gt__(self, other):
        return self._compare(">", other)

    def __ge__(self, other):
        return self._compare(">=", other)

    def like(self, pattern):
        """Whether the value is like the pattern."""
        return self._compare("LIKE", pattern)

    def in_(self, values):
        """Whether the value is one of these."""
        values = tuple(values)
        return Condition(f"{self.name} IN ({', '.join('?' * len(values))})", values)


def col(name):
    """The column of this name, `table.column` or `column`."""
    return Column(name)

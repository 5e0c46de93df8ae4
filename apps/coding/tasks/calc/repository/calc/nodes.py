"""The tree of an expression."""

from dataclasses import dataclass
from fractions import Fraction


class CalcError(ValueError):
    """An expression that cannot be read or has no value."""


@dataclass(frozen=True)
class Number:
    """A number that is not negative, written with digits and at most one dot."""

    value: Fraction


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Negative:
    operand: object


@dataclass(frozen=True)
class Binary:
    """`operator` is one of + - * / ^."""

    operator: str
    left: object
    right: object

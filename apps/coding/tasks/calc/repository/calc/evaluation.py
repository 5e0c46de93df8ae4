"""The value of an expression."""

import operator
from fractions import Fraction

from calc.nodes import CalcError, Name, Negative, Number
from calc.parser import parse

LARGEST_EXPONENT = 1000
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def evaluate(expression, **names):
    """The value of a text or a tree, as a fraction."""
    node = parse(expression) if isinstance(expression, str) else expression
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        if node.name not in names:
            raise CalcError(f"unknown name {node.name!r}")
        return Fraction(names[node.name])
    if isinstance(node, Negative):
        return -evaluate(node.operand, **names)
    left, right = evaluate(node.left, **names), evaluate(node.right, **names)
    if node.operator == "^":
        if right.denominator != 1 or abs(right) > LARGEST_EXPONENT:
            raise CalcError(f"not an exponent: {right}")
        if left == 0 and right < 0:
            raise CalcError("division by zero")
        return left ** int(right)
    if node.operator == "/" and right == 0:
        raise CalcError("division by zero")
    return OPERATIONS[node.operator](left, right)

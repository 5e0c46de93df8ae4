"""From a tree to text."""

from calc.nodes import Name, Negative, Number

LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 4}
NEGATIVE_LEVEL = 3
ATOM_LEVEL = 5


def level(node):
    """How tight the outermost operator binds."""
    if isinstance(node, (Number, Name)):
        return ATOM_LEVEL
    return NEGATIVE_LEVEL if isinstance(node, Negative) else LEVELS[node.operator]


def inside(node, least):
    """The text of a part, in parentheses if it binds less than `least`."""
    text = to_text(node)
    return f"({text})" if level(node) < least else text


def to_text(node):
    """The text of a tree, with the parentheses that it needs."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Number):
        whole = node.value.denominator == 1
        return str(node.value.numerator) if whole else str(float(node.value))
    if isinstance(node, Negative):
        return "-" + inside(node.operand, NEGATIVE_LEVEL)
    mine = level(node)
    return f"{inside(node.left, mine)} {node.operator} {inside(node.right, mine)}"

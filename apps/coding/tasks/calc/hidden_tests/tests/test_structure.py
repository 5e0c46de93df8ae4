import random
from fractions import Fraction

from calc import CalcError, evaluate, parse, to_text
from calc.nodes import Binary, Name, Negative, Number


def tree(source, depth):
    """A random tree of at most this depth."""
    kind = source.random()
    if depth == 0 or kind < 0.15:
        return Number(Fraction(source.randrange(4))) if kind < 0.5 else Name(source.choice("xy"))
    if kind < 0.35:
        return Negative(tree(source, depth - 1))
    return Binary(source.choice("+-*/^"), tree(source, depth - 1), tree(source, depth - 1))


def value(node):
    try:
        return evaluate(node, x=3, y=-2)
    except CalcError:
        return None


def test_a_minus_before_a_power():
    assert evaluate("-3 ^ 2") == -9
    assert evaluate("--3 ^ 2") == 9
    assert evaluate("5 - -3 ^ 2") == 14
    assert evaluate("2 * -x ^ 3", x=2) == -16
    assert parse("-x ^ y") == Negative(parse("x ^ y"))


def test_a_minus_in_an_exponent():
    assert evaluate("2 ^ -2 ^ 2") * 16 == 1
    assert evaluate("-2 ^ -2") * 4 == -1
    assert evaluate("4 ^ --1") == 4
    assert evaluate("2 ^ -1 * 6") == 3
    assert evaluate("(-3) ^ 2 ^ 1") == 9


def test_parentheses_that_matter():
    for text in (
        *("9 - (5 - 4)", "9 - (5 + 4)", "8 / (4 / 2)", "8 / (4 * 2)", "2 * (3 / 4)", "1 + (2 + 3)"),
        *("(2 ^ 3) ^ 2", "(-x) ^ 2", "(--x) ^ 2", "(1 + 2) ^ 3"),
    ):
        assert to_text(parse(text)) == text


def test_parentheses_that_are_not_needed():
    assert to_text(parse("((9 - 5) - 4) + 1")) == "9 - 5 - 4 + 1"
    assert to_text(parse("(8 / 4) * 2")) == "8 / 4 * 2"
    assert to_text(parse("2 ^ (3 ^ 2)")) == "2 ^ 3 ^ 2"
    assert to_text(parse("-(x ^ 2)")) == "-x ^ 2"
    assert to_text(parse("(-x) * (-y) - (-1)")) == "-x * -y - -1"
    assert to_text(parse("2 ^ (-(x ^ 2))")) == "2 ^ -x ^ 2"
    assert to_text(parse("1 - (2 * 3 ^ 4)")) == "1 - 2 * 3 ^ 4"


def test_random_trees_are_read_back():
    source = random.Random(8)
    for _ in range(1500):
        node = tree(source, 4)
        text = to_text(node)
        assert parse(text) == node, text


def test_random_trees_keep_their_values():
    source = random.Random(21)
    for _ in range(300):
        node = tree(source, 3)
        assert value(parse(to_text(node))) == value(node)

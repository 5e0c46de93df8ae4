from fractions import Fraction

import pytest

from calc import CalcError, evaluate, parse, to_text


def test_values():
    assert evaluate("1 + 2 * 3") == 7
    assert evaluate("1 - 2 - 3") == -4
    assert evaluate("8 / 4 / 2") == 1
    assert evaluate("2 ^ 3 ^ 2") == 512
    assert evaluate("(-2) ^ 2") == 4
    assert evaluate("-(1 + 2) * 0.5") == Fraction(-3, 2)


def test_a_minus_before_an_operand():
    assert evaluate("2 * -3") == -6
    assert evaluate("2 ^ -1") == Fraction(1, 2)
    assert evaluate("--3") == 3


def test_names():
    assert evaluate("2 * (x + 1) / y", x=4, y=3) == Fraction(10, 3)


@pytest.mark.parametrize("text", ["", "1 +", "(1", "1)", "1 2", "a$", "1 / 0", "0 ^ -1", "2 ^ 0.5", "x", "+1"])
def test_errors(text):
    with pytest.raises(CalcError):
        evaluate(text)


def test_texts_stay_as_they_are():
    for text in ("1 + 2 * 3", "(1 + 2) * 3", "-(1 + x) / 2.5", "1 - 2 - 3", "2 * -3", "(1 * 2) ^ 3"):
        assert to_text(parse(text)) == text

import pytest

from numerals import from_roman, to_roman


def test_known_numerals():
    assert [to_roman(number) for number in (1, 4, 9, 40, 1994)] == ["I", "IV", "IX", "XL", "MCMXCIV"]


def test_every_numeral_is_read_back():
    assert all(from_roman(to_roman(number)) == number for number in range(1, 4000))


@pytest.mark.parametrize("text", ["", "IIII", "IL", "VX", "MMMM", "ABC"])
def test_wrong_numerals_are_refused(text):
    with pytest.raises(ValueError):
        from_roman(text)

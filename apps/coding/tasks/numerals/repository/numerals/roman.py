"""Roman numerals from 1 to 3999."""

SYMBOLS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)


def to_roman(number):
    """The numeral of a whole number."""
    if not 1 <= number <= 3999:
        raise ValueError(f"Roman numerals go from 1 to 3999, not {number}")
    letters = []
    for value, symbol in SYMBOLS:
        count, number = divmod(number, value)
        letters.append(symbol * count)
    return "".join(letters)


def from_roman(text):
    """The number of a numeral; forms that nobody writes, such as IIII or IL, are refused."""
    rest, number = text.strip().upper(), 0
    for value, symbol in SYMBOLS:
        while rest.startswith(symbol):
            rest = rest.removeprefix(symbol)
            number += value
    if rest or not 1 <= number <= 3999 or to_roman(number) != text.strip().upper():
        raise ValueError(f"not a Roman numeral: {text!r}")
    return number

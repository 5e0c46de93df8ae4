"""Print other forms of the numbers given as arguments."""

import sys

from numerals import from_words, to_roman, to_words


def main(arguments):
    """Print one line per argument; return 1 when one of them is no number."""
    status = 0
    for argument in arguments:
        try:
            number = int(argument) if argument.lstrip("-").isdigit() else from_words(argument)
            roman = f" {to_roman(number)}" if 1 <= number <= 3999 else ""
            print(f"{number}{roman} {to_words(number)}")
        except ValueError as error:
            print(f"numerals: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

import random

import pytest

from numerals import from_words, to_words
from numerals.__main__ import main

RANDOM = random.Random(20)


def test_two_scale_words():
    assert from_words("seven million forty thousand") == 7_040_000
    assert from_words("nine billion eight thousand and one") == 9_000_008_001


def test_three_scale_words_and_a_sign():
    assert from_words("minus six billion five million four thousand three hundred and two") == -6_005_004_302


def test_random_names_are_read_back():
    numbers = [RANDOM.randrange(10**12) for _ in range(300)] + [RANDOM.randrange(10**7) for _ in range(300)]
    assert [from_words(to_words(number)) for number in numbers] == numbers


def test_the_command_line_reads_them(capsys):
    assert main(["four billion thirty million"]) == 0
    assert capsys.readouterr().out == "4030000000 four billion thirty million\n"


@pytest.mark.parametrize("scale", ["thousand", "million", "billion"])
def test_one_scale_word_is_as_before(scale):
    value = {"thousand": 10**3, "million": 10**6, "billion": 10**9}[scale]
    assert from_words(scale) == value
    assert from_words(f"five hundred and twelve {scale} eighty-one") == 512 * value + 81

import pytest

from numerals import from_words, to_words


def test_known_names():
    assert to_words(0) == "zero"
    assert to_words(115) == "one hundred fifteen"
    assert to_words(-42_007) == "minus forty-two thousand seven"


def test_names_up_to_ten_thousand_are_read_back():
    assert all(from_words(to_words(number)) == number for number in range(10_000))


def test_and_is_ignored():
    assert from_words("Three hundred thousand and six") == 300_006


@pytest.mark.parametrize("text", ["", "two bananas", "minus"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError):
        from_words(text)

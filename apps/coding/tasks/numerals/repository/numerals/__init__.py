"""Roman numerals and English number words."""

from numerals.roman import from_roman, to_roman
from numerals.words import from_words, to_words

__all__ = ["from_roman", "from_words", "to_roman", "to_words"]

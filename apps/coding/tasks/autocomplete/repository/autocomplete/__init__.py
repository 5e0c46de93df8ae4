"""Completions of words by a trie."""

from autocomplete.files import load, save
from autocomplete.trie import Trie

__all__ = ["Trie", "load", "save"]

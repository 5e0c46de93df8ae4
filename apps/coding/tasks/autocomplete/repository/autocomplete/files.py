"""Dictionaries in files."""

from pathlib import Path

from autocomplete.trie import Trie


def load(path):
    """The trie of a file of lines WORD<tab>WEIGHT; the weight may be missing, and is 1 then."""
    trie = Trie()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        word, _, weight = line.partition("\t")
        try:
            trie.add(word, int(weight or 1))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return trie


def save(trie, path):
    """Write all words to a file that `load` reads."""
    lines = (f"{word}\t{weight}\n" for word, weight in trie.items())
    Path(path).write_text("".join(lines), encoding="utf-8")

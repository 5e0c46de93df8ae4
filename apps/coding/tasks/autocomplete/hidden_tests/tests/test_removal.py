import random

import pytest

from autocomplete import Trie


def nodes(words):
    return len({word[:end] for word in words for end in range(1, len(word) + 1)})


def test_the_shorter_word_stays():
    trie = Trie({"sing": 4, "singer": 2})
    trie.remove("singer")
    assert trie.items() == [("sing", 4)]
    assert trie.node_count() == 4
    assert len(trie) == 1


def test_a_chain_of_words_from_the_longest():
    words = ["a", "ab", "abc", "abcdef", "abcdefg"]
    trie = Trie(dict.fromkeys(words, 0))
    while words:
        trie.remove(words.pop())
        assert [word for word, _ in trie.items()] == words
        assert trie.node_count() == nodes(words)


def test_a_word_of_weight_zero_is_a_word():
    trie = Trie({"no": 0, "nobody": 1})
    trie.remove("nobody")
    assert "no" in trie
    assert trie.complete("n") == ["no"]


def test_random_changes_as_in_a_dictionary():
    source = random.Random(5)
    trie, known = Trie(), {}
    for _ in range(600):
        word = "".join(source.choices("abc", k=source.randint(1, 5)))
        if source.random() < 0.5:
            known[word] = source.randrange(4)
            trie.add(word, known[word])
        elif word in known:
            trie.remove(word)
            del known[word]
        else:
            with pytest.raises(KeyError):
                trie.remove(word)
        assert len(trie) == len(known)
        assert trie.node_count() == nodes(known)
    assert trie.items() == sorted(known.items())


def test_the_root_stays():
    trie = Trie({"xy": 1})
    trie.remove("xy")
    assert trie.node_count() == 0
    trie.add("xyz")
    assert trie.complete("x") == ["xyz"]

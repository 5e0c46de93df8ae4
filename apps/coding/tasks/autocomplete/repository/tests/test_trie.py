import pytest

from autocomplete import Trie, load, save


@pytest.fixture
def trie():
    return Trie({"car": 3, "cart": 9, "care": 3, "dog": 1})


def test_completions_by_weight_then_by_the_alphabet(trie):
    assert trie.complete("car") == ["cart", "car", "care"]
    assert trie.complete("", limit=2) == ["cart", "car"]
    assert trie.complete("x") == []


def test_use_adds_one(trie):
    trie.use("dog")
    trie.use("new")
    assert (trie.weight("dog"), trie.weight("new"), trie.weight("ca")) == (2, 1, None)


def test_a_word_in_the_middle_is_removed(trie):
    trie.remove("car")
    assert "car" not in trie
    assert trie.complete("car") == ["cart", "care"]
    with pytest.raises(KeyError):
        trie.remove("car")


def test_branches_without_words_are_dropped(trie):
    assert trie.node_count() == 8
    trie.remove("dog")
    assert trie.node_count() == 5
    assert len(trie) == 3


def test_files(trie, tmp_path):
    save(trie, tmp_path / "words")
    assert load(tmp_path / "words").items() == trie.items()
    (tmp_path / "words").write_text("one\t1\ntwo\tmany\n")
    with pytest.raises(ValueError, match="line 2"):
        load(tmp_path / "words")

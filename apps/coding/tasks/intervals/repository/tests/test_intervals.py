import pytest

from intervals import IntervalTree


@pytest.fixture
def tree():
    tree = IntervalTree()
    for start, end, value in ((9, 12, "Ada"), (14, 15, []), (11, 13, "Grace"), (9, 12, "Alan"), (9, 10, "Ada")):
        tree.add(start, end, value)
    return tree


def test_order(tree):
    assert list(tree) == [(9, 10, "Ada"), (9, 12, "Ada"), (9, 12, "Alan"), (11, 13, "Grace"), (14, 15, [])]
    assert len(tree) == 5


def test_queries(tree):
    assert [value for *_, value in tree.at(11)] == ["Ada", "Alan", "Grace"]
    assert [value for *_, value in tree.at(13)] == []
    assert list(tree.overlapping(12, 14)) == [(11, 13, "Grace")]
    assert tree.free(8, 18) == [(8, 9), (13, 14), (15, 18)]
    assert tree.free(9, 12) == []


def test_removing(tree):
    tree.remove(9, 12, "Ada")
    tree.remove(14, 15, [])
    assert list(tree) == [(9, 10, "Ada"), (9, 12, "Alan"), (11, 13, "Grace")]
    for wrong in ((9, 12, "Ada"), (9, 13, "Alan"), (0, 1, None)):
        with pytest.raises(KeyError):
            tree.remove(*wrong)


def test_intervals_end_after_their_start(tree):
    for call in (tree.add, tree.overlapping):
        with pytest.raises(ValueError, match="after its start"):
            call(3, 3)

import random
from math import log2

import pytest

from intervals import IntervalTree

SIZE = 600
FEW = int(30 * log2(SIZE))
"""Comparisons that a call may make, and about half of those of a loop over all intervals."""


class Point:
    """A number that counts how often it is compared."""

    compared = 0

    def __init__(self, number):
        self.number = number

    def _count(self):
        Point.compared += 1
        return self.number

    def __lt__(self, other):
        return self._count() < other.number

    def __le__(self, other):
        return self._count() <= other.number

    def __gt__(self, other):
        return self._count() > other.number

    def __ge__(self, other):
        return self._count() >= other.number

    def __eq__(self, other):
        return self._count() == other.number

    __hash__ = None


def counted(call, *numbers):
    """The result of a call, and the comparisons it made."""
    before = Point.compared
    result = call(*map(Point, numbers))
    result = None if result is None else [(start.number, end.number) for start, end, _ in result]
    return result, Point.compared - before


HOURS = [(10 * hour, 10 * hour + 8) for hour in range(SIZE)]
OUTSIDE_IN = [pair for two in zip(HOURS[: SIZE // 2], HOURS[: SIZE // 2 - 1 : -1]) for pair in two]
ORDERS = {
    "sorted": HOURS,
    "reversed": HOURS[::-1],
    "shuffled": random.Random(1).sample(HOURS, SIZE),
    "outside_in": OUTSIDE_IN,
    "inside_out": OUTSIDE_IN[::-1],
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def tree(request):
    """A tree of hours that were added in some order."""
    tree = IntervalTree()
    for pair in request.param:
        assert counted(tree.add, *pair)[1] <= FEW
    return tree


def test_queries_compare_few_points(tree):
    for number in (-5, 3, 9, 1234, 10 * SIZE - 7, 10 * SIZE + 50):
        found, compared = counted(tree.at, number)
        assert found == [pair for pair in HOURS if pair[0] <= number < pair[1]]
        assert compared <= FEW
    for start, end in ((-9, -1), (8, 10), (1001, 1055), (10 * SIZE, 10 * SIZE + 9)):
        found, compared = counted(tree.overlapping, start, end)
        assert found == [pair for pair in HOURS if pair[0] < end and start < pair[1]]
        assert compared <= FEW + 20 * len(found)


def test_long_intervals_among_short_ones(tree):
    long = [(-100, 20 * SIZE), (5, 10 * SIZE - 300), (10 * SIZE - 45, 11 * SIZE)]
    for pair in long:
        tree.add(*map(Point, pair))
    found, compared = counted(tree.at, 10 * SIZE + 30)
    assert found == [long[0], long[2]]
    assert compared <= 2 * FEW
    many = [(10 * hour + 5, 20 * SIZE) for hour in range(0, SIZE, 3)]
    for pair in many:
        tree.add(*map(Point, pair))
    for pair in many + long:
        assert counted(tree.remove, *pair)[1] <= FEW
    for number in (9, 3009, 10 * SIZE + 30):
        assert counted(tree.at, number) == ([], pytest.approx(0, abs=FEW))


def test_removing_compares_few_points_and_keeps_the_rest_fast(tree):
    for pair in HOURS[: SIZE // 2] + HOURS[SIZE // 2 + 40 :: 2]:
        assert counted(tree.remove, *pair)[1] <= FEW
    left = HOURS[SIZE // 2 : SIZE // 2 + 40] + HOURS[SIZE // 2 + 41 :: 2]
    assert counted(tree.__iter__)[0] == left
    for number in (left[7][0], left[60][1] - 1, 0):
        found, compared = counted(tree.at, number)
        assert found == [pair for pair in left if pair[0] <= number < pair[1]]
        assert compared <= FEW


def test_many_sorted_intervals():
    tree = IntervalTree()
    for hour in range(5000):
        tree.add(hour, hour + 1)
    assert list(tree.at(4321)) == [(4321, 4322, None)]
    assert tree.free(-2, 3) == [(-2, 0)]


def test_random_use_as_in_a_list():
    source, tree, known = random.Random(30), IntervalTree(), []
    for step in range(900):
        start = source.randrange(60)
        end = start + source.choice([1, 1, 2, 5, 40])
        if source.random() < 0.55:
            value = source.choice([{"a": 1}, None, step])
            tree.add(start, end, value)
            known.append((start, end, value))
            known.sort(key=lambda triple: triple[:2])
        elif known and source.random() < 0.8:
            gone = source.choice(known)
            tree.remove(*gone)
            known.remove(gone)
        elif (start, end, "never") not in known:
            with pytest.raises(KeyError):
                tree.remove(start, end, "never")
        assert len(tree) == len(known)
        if step % 5 == 0:
            assert list(tree.at(start)) == [one for one in known if one[0] <= start < one[1]]
            assert list(tree.overlapping(start, end)) == [one for one in known if one[0] < end and start < one[1]]
    assert list(tree) == known

import random
from itertools import permutations
from math import prod

from matrix import Matrix


def by_permutations(rows):
    """The determinant by its definition."""
    total = 0
    for order in permutations(range(len(rows))):
        inversions = sum(order[a] > order[b] for a in range(len(rows)) for b in range(a + 1, len(rows)))
        total += (-1) ** inversions * prod(rows[row][column] for row, column in enumerate(order))
    return total


def test_one_swap_and_either_sign():
    assert Matrix.parse("0 5; 7 2").determinant() == -35
    assert Matrix.parse("0 -5; 7 2").determinant() == 35
    assert Matrix.parse("0 0 1/2; 0 1 7; 1/3 0 0").determinant() * -6 == 1


def test_permutations_of_the_identity():
    for order in permutations(range(4)):
        rows = [[int(column == place) for column in range(4)] for place in order]
        assert Matrix(rows).determinant() == by_permutations(rows)


def test_random_matrices_with_many_zeros():
    source = random.Random(17)
    for size in (1, 2, 3, 4, 5):
        for _ in range(25):
            rows = [[source.choice([0, 0, 0, 1, -2, 3]) for _ in range(size)] for _ in range(size)]
            assert Matrix(rows).determinant() == by_permutations(rows), rows


def test_swapping_two_rows_changes_the_sign_only():
    source = random.Random(4)
    for _ in range(30):
        rows = [[source.randrange(-3, 4) * source.randrange(2) for _ in range(4)] for _ in range(4)]
        first, second = source.sample(range(4), 2)
        before = Matrix(rows).determinant()
        rows[first], rows[second] = rows[second], rows[first]
        assert Matrix(rows).determinant() == -before


def test_inverses_are_still_right():
    source, tried = random.Random(9), 0
    while tried < 15:
        matrix = Matrix([[source.choice([0, 0, 1, 2]) for _ in range(3)] for _ in range(3)])
        if matrix.determinant():
            assert matrix.inverse() @ matrix == Matrix.identity(3)
            tried += 1

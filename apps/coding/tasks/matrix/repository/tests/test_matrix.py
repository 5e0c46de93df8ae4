from fractions import Fraction

import pytest

from matrix import Matrix, ShapeError, SingularError, solve


def test_determinants():
    assert Matrix.parse("2 1; 1/2 3").determinant() == Fraction(11, 2)
    assert Matrix.parse("1 2 3; 4 5 6; 7 8 9").determinant() == 0
    assert Matrix.parse("0 1; 3 4").determinant() == -3
    assert Matrix.parse("1 2; 3 4").determinant() == -2


def test_inverse():
    matrix = Matrix.parse("0 2 1; 1 0 1; 1 1 1/3")
    assert matrix @ matrix.inverse() == Matrix.identity(3)
    with pytest.raises(SingularError):
        Matrix.parse("1 2; 2 4").inverse()


def test_solve():
    assert solve(Matrix.parse("0 1; 2 1"), [1, 3]) == [1, 1]


def test_shapes():
    assert Matrix.parse("1 2 3").transpose().shape == (3, 1)
    for wrong in (lambda: Matrix([[1], [1, 2]]), lambda: Matrix([]), lambda: Matrix.parse("1 2").determinant()):
        with pytest.raises(ShapeError):
            wrong()


def test_text():
    assert str(Matrix.parse("1 -10; 1/2 3")) == "  1 -10\n1/2   3"

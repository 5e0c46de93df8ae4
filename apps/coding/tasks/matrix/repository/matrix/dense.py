"""The matrix."""

from fractions import Fraction
from math import prod

from matrix.elimination import ShapeError, SingularError, substitute_back, upper_triangle


class Matrix:
    """Rows of fractions."""

    def __init__(self, rows):
        self.rows = tuple(tuple(Fraction(value) for value in row) for row in rows)
        if not self.rows or not self.rows[0] or len({len(row) for row in self.rows}) > 1:
            raise ShapeError("a matrix has rows of one length, and at least one value")

    @classmethod
    def parse(cls, text):
        """The matrix of text such as '1 2; 3 1/2'."""
        return cls(row.split() for row in text.split(";"))

    @classmethod
    def identity(cls, size):
        """The square matrix with 1 on its diagonal."""
        return cls([int(row == column) for column in range(size)] for row in range(size))

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0])

    def _square(self):
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"a square matrix is needed, not {self.shape[0]} x {self.shape[1]}")
        return [list(row) for row in self.rows]

    def transpose(self):
        return Matrix(zip(*self.rows))

    def determinant(self):
        """The determinant of a square matrix."""
        rows = self._square()
        swaps = upper_triangle(rows)
        if swaps is None:
            return Fraction(0)
        product = prod((row[index] for index, row in enumerate(rows)), start=Fraction(1))
        return -product if swaps % 2 else product

    def inverse(self):
        """The matrix that gives the identity when multiplied with this one."""
        rows = self._square()
        for row, unit in zip(rows, Matrix.identity(len(rows)).rows):
            row.extend(unit)
        if upper_triangle(rows) is None:
            raise SingularError("the matrix has no inverse")
        substitute_back(rows)
        return Matrix(row[len(rows) :] for row in rows)

    def __matmul__(self, other):
        if self.shape[1] != other.shape[0]:
            raise ShapeError(f"cannot multiply {self.shape} and {other.shape}")
        columns = list(zip(*other.rows))
        return Matrix([sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows)

    def __eq__(self, other):
        return isinstance(other, Matrix) and self.rows == other.rows

    def __hash__(self):
        return hash(self.rows)

    def __str__(self):
        width = max(len(str(value)) for row in self.rows for value in row)
        return "\n".join(" ".join(str(value).rjust(width) for value in row) for row in self.rows)

"""Exact matrices of fractions."""

from matrix.dense import Matrix
from matrix.elimination import ShapeError, SingularError
from matrix.equations import solve

__all__ = ["Matrix", "ShapeError", "SingularError", "solve"]

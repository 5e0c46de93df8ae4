"""Systems of linear equations."""

from matrix.dense import Matrix
from matrix.elimination import ShapeError


def solve(matrix, values):
    """The x for which `matrix @ x` is `values`."""
    if len(values) != matrix.shape[0]:
        raise ShapeError(f"{matrix.shape[0]} values are needed, not {len(values)}")
    solution = matrix.inverse() @ Matrix([value] for value in values)
    return [row[0] for row in solution.rows]

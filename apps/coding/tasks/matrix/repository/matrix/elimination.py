"""Gaussian elimination on lists of rows, which it changes."""


class ShapeError(ValueError):
    """Rows or columns that do not fit."""


class SingularError(ValueError):
    """A matrix that has no inverse."""


def _bring_pivot(rows, column):
    """Swap a row that is not 0 in this column into place; return how many swaps it took, or None if all are 0."""
    for index in range(column, len(rows)):
        if rows[index][column]:
            rows[column], rows[index] = rows[index], rows[column]
            return index - column
    return None


def upper_triangle(rows):
    """Make everything below the diagonal 0; return the number of swaps, or None for a singular matrix."""
    swaps = 0
    for column in range(len(rows)):
        swapped = _bring_pivot(rows, column)
        if swapped is None:
            return None
        swaps += swapped
        for index in range(column + 1, len(rows)):
            factor = rows[index][column] / rows[column][column]
            rows[index] = [value - factor * above for value, above in zip(rows[index], rows[column])]
    return swaps


def substitute_back(rows):
    """Make the left square of an upper triangle the identity."""
    for column in reversed(range(len(rows))):
        pivot = rows[column][column]
        rows[column] = [value / pivot for value in rows[column]]
        for index in range(column):
            factor = rows[index][column]
            rows[index] = [value - factor * below for value, below in zip(rows[index], rows[column])]

"""A spreadsheet that computes what is needed."""

from sheet.engine import Error, Sheet
from sheet.formula import FormulaError

__all__ = ["Error", "FormulaError", "Sheet"]

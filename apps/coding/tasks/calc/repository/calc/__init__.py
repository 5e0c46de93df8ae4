"""Arithmetic expressions."""

from calc.evaluation import evaluate
from calc.nodes import CalcError
from calc.parser import parse
from calc.printer import to_text

__all__ = ["CalcError", "evaluate", "parse", "to_text"]

"""SQL SELECT statements built from Python objects."""

from querysmith.conditions import col
from querysmith.select import Select

__all__ = ["Select", "col"]

"""Templates for text and HTML."""

from stencil.errors import TemplateError
from stencil.templates import Templates

__all__ = ["TemplateError", "Templates"]

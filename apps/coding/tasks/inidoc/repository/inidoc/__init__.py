"""Configuration files with sections, comments and quoted values."""

from inidoc.document import Document
from inidoc.errors import ParseError
from inidoc.reader import loads
from inidoc.writer import dumps

__all__ = ["Document", "ParseError", "dumps", "loads"]

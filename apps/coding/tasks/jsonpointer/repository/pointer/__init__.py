"""JSON pointers (RFC 6901)."""

from pointer.document import assign, get, remove
from pointer.errors import PointerError
from pointer.tokens import escape, join, split, unescape

__all__ = ["PointerError", "assign", "escape", "get", "join", "remove", "split", "unescape"]

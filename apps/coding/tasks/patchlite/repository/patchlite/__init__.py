"""Unified diffs of texts: make, read, apply."""

from patchlite.applying import apply
from patchlite.making import diff
from patchlite.patch import Hunk, PatchError, parse

__all__ = ["Hunk", "PatchError", "apply", "diff", "parse"]

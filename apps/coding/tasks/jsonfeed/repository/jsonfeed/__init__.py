"""JSON values out of a stream of bytes."""

from jsonfeed.feed import Feed
from jsonfeed.parser import JsonError, loads

__all__ = ["Feed", "JsonError", "loads"]

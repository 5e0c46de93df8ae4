"""UTC offsets as people write them."""

from utcoffset.offsets import OffsetError, format_offset, parse_offset
from utcoffset.times import convert, parse_time, to_utc

__all__ = ["OffsetError", "convert", "format_offset", "parse_offset", "parse_time", "to_utc"]

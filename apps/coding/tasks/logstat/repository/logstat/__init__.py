"""Statistics of web server logs."""

from logstat.lines import Entry, read
from logstat.statistics import Report, percentile, report

__all__ = ["Entry", "Report", "percentile", "read", "report"]

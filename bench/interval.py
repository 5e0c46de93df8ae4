"""Means of few values, with 95 % t-intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's 97.5 % quantile for 1, 2, ... degrees of freedom; the last one serves all above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and how far to either side its 95 % interval reaches."""

    mean: float
    half_width: float | None
    """None where there is one value only: it says nothing about the spread."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """The interval of the mean that these independent values are draws around."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean=mean, half_width=None, count=len(values))
        quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
        half_width = quantile * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean=mean, half_width=half_width, count=len(values))

    @property
    def holds_zero(self) -> bool:
        """Whether 0 lies within; one value alone excludes nothing."""
        return self.half_width is None or abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half_width is None else f"{self.mean:.3f} ± {self.half_width:.3f}"

"""Weighs prompt sources by how much the policy can learn from them, judged by its pass rate. Pure.

A group teaches through the differences between the rewards of its samples. For rewards of 0 and 1 and a pass rate p
their variance is p * (1 - p): 0 if a source is always or never passed, greatest at one half. The factor of a source is
this variance, scaled to at most 1. It is at least a floor, because a change of a source that is never asked would go
unnoticed. A factor does not depend on how the samples are divided into reports: the samples of a report fade one after
another, each with the report's pass rate.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from goaly.prompts.settings import CurriculumSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The number of samples that finished, and of those that passed."""

    samples: int
    passed: int

    @property
    def rate(self) -> float:
        """The share that passed."""
        return self.passed / self.samples


class Curriculum:
    """A factor for each source's weight, by its recent pass rate."""

    def __init__(self, sources: Iterable[str], settings: CurriculumSettings):
        self._settings = settings
        # passed, samples: begin as if one of two had passed
        self._counts = {source: (1.0, 2.0) for source in sources}

    def observe(self, passes: Mapping[str, Passes]) -> None:
        """Add these samples; older ones fade by half for every `half_life_samples` newer ones."""
        fading = math.log(2) / self._settings.half_life_samples
        for source, found in passes.items():
            kept = math.exp(-fading * found.samples)
            added = math.expm1(-fading * found.samples) / math.expm1(-fading)  # the faded weights of the new samples
            passed, samples = self._counts[source]
            self._counts[source] = (kept * passed + added * found.rate, kept * samples + added)

    def pass_rate(self, source: str) -> float:
        """The share of the source's recent samples that passed."""
        passed, samples = self._counts[source]
        return passed / samples

    def factor(self, source: str) -> float:
        """The factor of the source's weight."""
        rate = self.pass_rate(source)
        return max(self._settings.floor, 4 * rate * (1 - rate))

    def state_dict(self) -> dict[str, Any]:
        """The faded counts of each source."""
        return {source: list(counts) for source, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._counts = {source: (float(state[source][0]), float(state[source][1])) for source in self._counts}

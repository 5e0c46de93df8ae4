"""Which prompt sources are worth asking, judged by how often the policy passes. Pure.

A group teaches by the differences between its samples' rewards. For rewards of 0 and 1 and a pass rate p their
variance is p * (1 - p): nothing where a source is always or never passed, most where every other sample passes. A
source's factor is that variance, scaled to at most 1, and never below a floor: one that is never asked could not be
seen to change.

Invariants
    CU-1  A factor lies in [floor, 1], and depends on what was observed, not on how often it was reported: a report's
          samples fade one behind the other, each counted as passed by the report's share, for it has no order.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from goaly.prompts.settings import CurriculumSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How many samples finished, and how many of them passed."""

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
        # Passed, samples: one of two, before anything is seen.
        self._counts = {source: (1.0, 2.0) for source in sources}

    def observe(self, passes: Mapping[str, Passes]) -> None:
        """Take these samples into account; older ones fade, by half for every `half_life_samples` newer ones."""
        fading = math.log(2) / self._settings.half_life_samples
        for source, found in passes.items():
            kept = math.exp(-fading * found.samples)
            added = math.expm1(-fading * found.samples) / math.expm1(-fading)  # 1, and what is left of those before it
            passed, samples = self._counts[source]
            self._counts[source] = (kept * passed + added * found.rate, kept * samples + added)  # CU-1

    def pass_rate(self, source: str) -> float:
        """The share of the source's recent samples that passed."""
        passed, samples = self._counts[source]
        return passed / samples

    def factor(self, source: str) -> float:
        """What the source's weight is to be multiplied with (CU-1)."""
        rate = self.pass_rate(source)
        return max(self._settings.floor, 4 * rate * (1 - rate))

    def state_dict(self) -> dict[str, Any]:
        """What was observed."""
        return {source: list(counts) for source, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._counts = {source: (float(state[source][0]), float(state[source][1])) for source in self._counts}

"""The expected reward of each source: what a turn without siblings is compared with."""

from collections import Counter

PRIOR = 8
"""The first rewards count as if this many of 0 came before: a single one says little."""
MEMORY = 256
"""About this many of the newest rewards count."""


class Baselines:
    """A running mean of rewards for each source, which begins at 0."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._learned: Counter[str] = Counter()

    def of(self, source: str) -> float:
        """The expected reward of this source."""
        return self._means.get(source, 0.0)

    def learn(self, source: str, reward: float) -> None:
        """Count a reward of this source."""
        self._learned[source] += 1
        weight = 1 / (PRIOR + min(self._learned[source], MEMORY))
        self._means[source] = self.of(source) + weight * (reward - self.of(source))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Baselines) and self._means == other._means

    __hash__ = None  # type: ignore[assignment]

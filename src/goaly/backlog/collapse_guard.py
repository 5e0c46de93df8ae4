"""Notices a collapse of the policy from the metrics of a run's steps. Pure.

Two signals, each a mean over the last `window` steps:

    reward      has fallen from its best window by more than the noise of the run explains, and by a large part of what
                the run has gained. The noise is that between successive steps, so that a trend adds little to it.
    divergence  `sampler_kl`: the trainer gives the tokens that it learns from another distribution than their
                sampler did, so importance weights carry nothing any more

The reward is judged from the second window on, because it needs a history; the divergence from the first one on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean

from goaly.backlog.guard_settings import GuardSettings

REWARD, DIVERGENCE = "reward/mean", "sampler_kl"
DIFFERENCE_OF_NORMALS = 1.128
"""The mean absolute difference of two samples of a normal distribution, in its deviations."""
LEAST_FALL = 0.1
"""Share of the best mean reward that a fall must have in any case: a run whose answers all pass has no noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseVerdict:
    """The guard's opinion of a run after a step."""

    reasons: tuple[str, ...] = ()
    """The signals of a collapse; none if the run is healthy."""
    is_new: bool = False
    """Whether the step before had none."""

    @property
    def is_collapse(self) -> bool:
        """Whether the policy collapses."""
        return bool(self.reasons)


class CollapseGuard:
    """Follows the steps of one run."""

    def __init__(self, settings: GuardSettings):
        self._settings = settings
        self._rewards: list[float] = []
        self._divergences: list[float] = []
        self._means: list[float] = []
        """The mean reward of each window, by its last step."""
        self._changes = 0.0
        self._was_collapse = False

    def observe(self, metrics: Mapping[str, float]) -> CollapseVerdict:
        """The verdict about the run with this step."""
        reward, divergence = metrics.get(REWARD), metrics.get(DIVERGENCE)
        reasons = []
        if divergence is not None and (why := self._diverges(divergence)):
            reasons.append(why)
        if reward is not None and (why := self._falls(reward)):
            reasons.append(why)
        verdict = CollapseVerdict(reasons=tuple(reasons), is_new=bool(reasons) and not self._was_collapse)
        self._was_collapse = verdict.is_collapse
        return verdict

    def _diverges(self, divergence: float) -> str | None:
        window, limit = self._settings.window, self._settings.kl
        self._divergences = [*self._divergences, divergence][-window:]
        if limit is None or len(self._divergences) < window or (mean := fmean(self._divergences)) <= limit:
            return None
        return f"sampler_kl is {mean:.2g} on average over {window} steps, more than guard.kl={limit:g}"

    def _falls(self, reward: float) -> str | None:
        if not isfinite(reward):
            return None
        window = self._settings.window
        if self._rewards:
            self._changes += abs(reward - self._rewards[-1])
        self._rewards.append(reward)
        if len(self._rewards) < window:
            return None
        now = fmean(self._rewards[-window:])
        self._means.append(now)
        earlier = self._means[:-window]
        if not earlier:
            return None
        best, lowest = max(earlier), min(self._means)
        noise = self._changes / (len(self._rewards) - 1) / DIFFERENCE_OF_NORMALS * sqrt(2 / window)
        gained, least = self._settings.fall * (best - lowest), LEAST_FALL * abs(best)
        if best - now <= max(self._settings.deviations * noise, gained, least):
            return None
        return (
            f"the mean reward of {window} steps fell from {best:.3g} to {now:.3g}; the noise between the run's steps "
            f"explains {self._settings.deviations * noise:.2g}"
        )

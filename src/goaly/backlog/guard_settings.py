"""Settings of the guard against a collapse of the policy."""

from collections.abc import Iterator
from typing import Literal

from goaly.backlog.settings import BacklogSettings
from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings, Share


class GuardSettings(Settings):
    """The guard against a collapse of the policy. It compares the metrics of each step with the run's own history;
    `docs/guard.md` has the signals, and the evidence for the thresholds."""

    action: Literal["off", "report", "tighten", "stop"] = "report"
    """Reaction to a collapse. `report`: a line on the display and in the log. `tighten`: also a lower staleness bound
    until the signals are gone. `stop`: the run ends with an error, before it takes another checkpoint. `off`: no
    guard."""
    window: PositiveInt = 8
    """Steps whose mean is compared. Raise it if a step has few groups, so that its reward is noisy."""
    deviations: PositiveFloat = 6.0
    """Deviations of the difference of two windows by which the mean reward must have fallen from its best window. Lower
    it to notice a collapse sooner, at the risk of false alarms."""
    fall: Share = 0.5
    """Share of what the mean reward has gained since its lowest window that it must have lost again."""
    kl: PositiveFloat | None = 0.5
    """Mean of `sampler_kl` over a window, in nats a token, above which sampler and trainer are too far apart; null
    does not look at it."""
    tightened_staleness: NonNegativeInt = 0
    """Staleness bound of admission while the run is tightened; `backlog.max_staleness` applies again a window after
    the last signal."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.action != "tighten":
            yield from at.idle(f"{at}action is {self.action}", "tightened_staleness")
        if self.action == "off":
            yield from at.idle(f"{at}action is off", "window", "deviations", "fall", "kl")

    def problems_beside(self, at: Section, at_backlog: Section, backlog: BacklogSettings) -> Iterator[str]:
        """One line if the staleness bound leaves nothing to tighten."""
        if self.action == "tighten" and self.tightened_staleness >= backlog.max_staleness:
            yield f"{at.tightened_staleness}: must be below {at_backlog.max_staleness} where {at}action is tighten"

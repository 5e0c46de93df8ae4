"""Counts of finished groups, trained or not: passes by source, groups without a signal, and responses that no verifier
scored. Pure.

Counts every finished group, also those that dynamic sampling rejects: what is trained then says little about what the
policy can do.

Invariants
    OU-1  Dynamic sampling can't go on for ever with groups that have no signal: once `RECENT_STEPS` steps' worth of
          groups have finished, a share of them above the limit is an error.
"""

from collections import deque
from collections.abc import Mapping

from goaly.backlog.settings import BacklogSettings
from goaly.errors import RunFailed
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import PASS_REWARD
from goaly.reward.advantages import has_signal
from goaly.trajectory import Group

NO_SIGNAL = "no_signal"
RECENT_STEPS = 16
"""The share of groups without signal is that of the last so many steps' worth of finished groups."""


class Outcomes:
    """Counts what finished."""

    def __init__(self, settings: BacklogSettings):
        self._limit = settings.max_no_signal_share
        self._recent: deque[bool] = deque(maxlen=RECENT_STEPS * settings.groups_per_step)
        self._passes: dict[str, Passes] = {}
        self._errors = self._timeouts = 0

    def saw(self, group: Group) -> bool:
        """Count a finished group; whether it has a signal."""
        rewards = [sample.reward for sample in group.samples]
        before = self._passes.get(group.source, Passes(samples=0, passed=0))
        self._passes[group.source] = Passes(
            samples=before.samples + len(rewards),
            passed=before.passed + sum(reward >= PASS_REWARD for reward in rewards),
        )
        self._errors += group.verifier_errors
        self._timeouts += group.verifier_timeouts
        signal = has_signal(rewards)
        self._recent.append(not signal)
        return signal

    @property
    def no_signal_share(self) -> float:
        """The share of the recent groups that had no signal."""
        return sum(self._recent) / len(self._recent)

    def hopeless(self) -> RunFailed | None:
        """The error to end with when replacing groups without signal has become too costly (OU-1)."""
        if len(self._recent) < (self._recent.maxlen or 0) or self.no_signal_share <= self._limit:
            return None
        return RunFailed(
            f"{sum(self._recent)} of the last {len(self._recent)} groups had no signal (all samples of each got the "
            f"same reward), more than backlog.max_no_signal_share={self._limit}: the prompts are too easy or too "
            "hard for the policy, or the verifier gives everything the same reward"
        )

    def take(self) -> Mapping[str, Passes]:
        """The passes by source since they were last taken."""
        taken, self._passes = self._passes, {}
        return taken

    def take_unscored(self) -> dict[str, float]:
        """The metrics of responses that no verifier scored and that got reward 0, since they were last taken."""
        taken = {"reward/verifier_errors": float(self._errors), "reward/verifier_timeouts": float(self._timeouts)}
        self._errors = self._timeouts = 0
        return taken

"""Statistics of all finished groups, trained or not, and of those that wait for a batch. Pure.

Groups that dynamic sampling rejects count too: the trained groups alone would say little about the policy.

Dynamic sampling ends the run if more than `max_no_signal_share` of the groups finished in the last `RECENT_STEPS`
steps' worth have no signal.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from goaly.backlog.events import Dropped
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import RunFailed
from goaly.base.telemetry import spans
from goaly.prompts.curriculum import Passes
from goaly.prompts.prompt import PASS_REWARD
from goaly.trajectory import Group

NO_SIGNAL = "no_signal"
ALWAYS = ("agents/malformed_calls", "agents/sessions_truncated", "reward/verifier_errors", "reward/verifier_timeouts")
"""Counts that are metrics of every step, also where they are 0."""
RECENT_STEPS = 16
"""The share of groups without signal is taken over this many steps' worth of finished groups."""


class GroupStatistics:
    """Counts finished groups."""

    def __init__(self, settings: BacklogSettings):
        self._limit = settings.max_no_signal_share
        self._recent: deque[bool] = deque(maxlen=RECENT_STEPS * settings.groups_per_step)
        self._passes: dict[str, Passes] = {}
        self._counts: Counter[str] = Counter()

    def count(self, group: Group) -> bool:
        """Count a finished group, and return whether it has a signal."""
        self._counts.update(group.counts)
        rewards = group.rewards
        before = self._passes.get(group.source, Passes(samples=0, passed=0))
        self._passes[group.source] = Passes(
            samples=before.samples + len(rewards),
            passed=before.passed + sum(reward >= PASS_REWARD for reward in rewards),
        )
        self._recent.append(not group.has_signal)
        return group.has_signal

    def count_dropped(self, dropped: Dropped) -> None:
        """Count what happened in the episodes of a group that is not trained."""
        self._counts.update(dropped.counts)

    def forget(self) -> None:
        """Forget which recent groups had a signal: what caused it may have been changed."""
        self._recent.clear()

    @property
    def no_signal_share(self) -> float:
        """The share of recent groups without signal."""
        return sum(self._recent) / max(1, len(self._recent))

    def signal_error(self) -> RunFailed | None:
        """The error that ends the run if too many recent groups had no signal; None if not."""
        if len(self._recent) < (self._recent.maxlen or 0) or self.no_signal_share <= self._limit:
            return None
        return RunFailed(
            f"{sum(self._recent)} of the last {len(self._recent)} groups had no signal (all samples of each got the "
            f"same reward), more than backlog.max_no_signal_share={self._limit}: the prompts are too easy or too "
            "hard for the policy, or the verifier gives everything the same reward"
        )

    def take_passes(self) -> Mapping[str, Passes]:
        """The passes by source since the last call."""
        taken, self._passes = self._passes, {}
        return taken

    def take_counts(self) -> dict[str, float]:
        """The counts of episodes since the last call, as metrics."""
        taken, self._counts = self._counts, Counter()
        return {name: float(taken[name]) for name in sorted({*ALWAYS, *taken})}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "recent": list(self._recent),
            "passes": {source: asdict(passes) for source, passes in self._passes.items()},
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._recent.extend(state["recent"])
        self._passes = {source: Passes(**passes) for source, passes in state["passes"].items()}
        self._counts = Counter(state["counts"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The groups, or the disk, that the next batch waits for."""

    ticket: int | None
    """The oldest running group, which holds the window back; None if no group is running."""
    finished: int
    """Complete groups that are not in a batch yet."""
    needed: int
    """Groups in a batch."""
    rejected: int
    """Groups rejected so far."""
    failed: int
    """Groups that failed so far."""
    disk_seconds: float = 0.0
    """Seconds that it has waited for the disk."""
    disk_file: Path | None = None
    """The file of the run's log that the disk has not written; None if it does not wait for the disk."""

    def __str__(self) -> str:
        """A line for the log."""
        disk = ""
        if self.disk_file is not None:
            disk = f"the next batch waits {self.disk_seconds:.0f} s for the disk to write {self.disk_file}; "
        ended = f"{self.rejected} groups were rejected, {self.failed} failed so far"
        return f"{disk}{self.finished} complete groups wait for a batch of {self.needed}; {ended}"


class QueueWaits:
    """Measures how long groups wait in the queue for their batch."""

    def __init__(self) -> None:
        self._queued_ns: dict[int, int] = {}

    def begin(self, tickets: Iterable[int]) -> None:
        """The groups of these tickets wait from now on."""
        self._queued_ns |= dict.fromkeys(tickets, time.time_ns())

    def end(self, tickets: Sequence[int]) -> dict[str, float]:
        """Metrics of a batch of these groups, which no longer wait."""
        now = time.time_ns()
        waits = []
        for ticket in tickets:
            queued = self._queued_ns.pop(ticket)
            spans.record("queue_wait", queued, now, ticket=ticket)
            waits.append((now - queued) / 1e9)
        return {"queue/wait_seconds_mean": sum(waits) / len(waits), "queue/wait_seconds_max": max(waits)}

"""Names what a training loop waits for, and measures how long groups wait in the queue."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from goaly.base.telemetry import spans


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

"""The number of requests, or of episodes, that may be under way at once. Pure: no clock, no engine.

The limit starts low and follows measurements. It grows by a quarter per *turnover* (as many ends as the limit allows
under way) as long as it holds work back, the key-value cache has room, and the engines have no queue. It shrinks when
the cache is nearly full, when the engine preempts requests, and when work queues at the engines.

A limit that shrank after it grew waits for twice as many turnovers before it grows again, so it comes to rest although
the use of the cache varies by chance.

A change takes effect slowly: work that is under way goes on, and new requests have short contexts. So each decision
uses measurements of the present limit only. Without that rule a full cache cuts a limit of 1,024 to 8: each step finds
it still full and cuts again.

    base-5: A limit is at least `least`. It shrinks once, and not again before the work under way fits it.
"""

from dataclasses import dataclass
from math import ceil

GROWTH = 1.25
ROOMY, FULL = 0.6, 0.8
"""Shares of the cache in use: below the first the limit may grow, above the second it shrinks. One growth from the
first ends below the second."""
AIM = 0.7
"""The share of the cache that a shrunken limit aims at."""
CUT = 0.8
"""The share of the limit that is left after a preemption."""
LONG_QUEUE, RESERVE = 0.3, 1.1
"""A queue is long if it is a larger share of the work under way. Then the limit becomes what the engines run, times a
reserve, so that they find work when a request ends."""
MOST_PATIENCE = 16
"""Most turnovers before the next growth."""
STORM = 0.1
"""Share of failures among the ends of a turnover above which it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """A measurement. The counts are those since the one before."""

    under_way: int
    holds_back: bool
    """Whether the limit holds more work back."""
    cache_use: float
    """Share of the key-value cache that running requests use."""
    queued: int = 0
    """How many of those under way have no room in an engine."""
    preemptions: int = 0
    ended: int = 0
    """Without the failed ones."""
    failed: int = 0


class InflightLimit:
    """Follows the loads that it observes."""

    def __init__(self, *, start: int, least: int, most: int):
        self.least, self.most = min(least, most), most
        self.value = min(max(start, least), most)
        """How many may be under way."""
        self._patience = 1
        self._grew = False
        """Whether its last change was a growth."""
        self._begin()

    def observe(self, load: MeasuredLoad) -> None:
        """Take a measurement into account; `value` is the limit from now on."""
        if load.under_way > self.value:  # base-5
            self._begin()
            return
        self._ended += load.ended
        self._failed += load.failed
        self._highest_use = max(self._highest_use, load.cache_use)
        self._shortest_queue = min(self._shortest_queue, load.queued)
        self._holds_back |= load.holds_back
        if load.preemptions:
            self._change(int(self.value * CUT))
        elif load.cache_use > FULL:
            self._change(int(load.under_way * AIM / load.cache_use))
        elif self._ended >= self.value * self._patience:
            self._turn_over(load)

    def _turn_over(self, load: MeasuredLoad) -> None:
        wanted = self.value
        if self._failed <= STORM * (self._ended + self._failed):
            if self._shortest_queue > LONG_QUEUE * load.under_way:
                wanted = min(wanted, ceil(RESERVE * (load.under_way - self._shortest_queue)))
            elif self._holds_back and self._highest_use < ROOMY and self._shortest_queue == 0:
                wanted = ceil(wanted * GROWTH)
        self._change(wanted)

    def _change(self, wanted: int) -> None:
        wanted = min(max(wanted, self.least), self.most)  # base-5
        if wanted != self.value:
            grows = wanted > self.value
            if self._grew:
                self._patience = max(1, self._patience // 2) if grows else min(2 * self._patience, MOST_PATIENCE)
            self._grew = grows
        self.value = wanted
        self._begin()

    def _begin(self) -> None:
        """Forget what was measured so far."""
        self._ended = self._failed = 0
        self._highest_use = 0.0
        self._shortest_queue = self.most
        self._holds_back = False

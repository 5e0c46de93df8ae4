"""When the next group may start, and the oldest policy version that may sample it. Pure arithmetic.

Let G be `groups_per_step` and S `max_staleness`. Batch k consumes the G groups that bring version k to k + 1. The
*position* p of a ticket is the number of tickets admitted before it that were neither rejected nor failed when it was
admitted; in FIFO order and without later drops it would be trained by batch `p // G`.

Invariants
    AD-1  A ticket is admitted only while p < (policy_version + S + 1) * G.
    AD-2  Every token of a ticket is sampled by weights of at least `min_version = max(0, p // G - S)`. The generator
          holds a request back until it has such weights, so the bound does not depend on how soon weights arrive.
    AD-3  min_version <= policy_version at admission (by AD-1): no ticket waits for weights that depend on its training.
    AD-4  Later events can't break the age bound. Tickets dropped later only bring p's batch forward, and with a window
          of W (order.py) at most W - 1 later tickets overtake it, so it is trained by batch
          k <= (p + W - 1) // G <= p // G + ceil((W - 1) / G). The age of its tokens is then at most
          k - min_version <= S + ceil((W - 1) / G). With S = 0 it is 0: batch p // G has no other groups to choose from.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to start one group."""

    index: int
    """Its number in the order of admission, from 0."""
    min_version: int
    """Oldest policy version that may sample any token of the group."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission rule of one run."""

    groups_per_step: int
    max_staleness: int
    steps: int | None = None
    """Training steps of the run; None for an endless run."""

    def is_open(self, position: int, policy_version: int) -> bool:
        """Whether a ticket at this position may be admitted now (AD-1)."""
        last_step = policy_version + self.max_staleness + 1
        if self.steps is not None:
            last_step = min(last_step, self.steps)
        return position < last_step * self.groups_per_step

    def min_version(self, position: int) -> int:
        """The oldest version that may sample a ticket admitted at this position (AD-2)."""
        return max(0, position // self.groups_per_step - self.max_staleness)

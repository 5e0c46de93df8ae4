"""The bound on staleness: when the next group may start, and the oldest policy version that may sample it. Pure.

Let G be `groups_per_step` and S `max_staleness`. Batch k consumes the G groups that bring version k to k + 1. The
*position* p of a ticket is the number of tickets admitted before it that were neither rejected nor failed when it was
admitted; in FIFO order and without later drops it would be trained by batch `p // G`.

    backlog-1: A group may start only while p < (policy_version + S + 1) * G. Hence at most (S + 1) * G groups are
        admitted and not yet trained, and no ticket waits for weights that depend on its own training.
    backlog-2: Weights of at least `min_version = max(0, p // G - S)` sample every token of a ticket. The generator
        holds a request back until it has such weights, so the bound does not depend on when weights arrive.
    backlog-3: The age of a trained token is at most S + ceil((W - 1) / G) with a window of W (`order.py`), and 0 with
        S = 0. Tickets dropped later only bring p's batch forward, and at most W - 1 later tickets overtake it. Hence
        batch k <= (p + W - 1) // G <= p // G + ceil((W - 1) / G) trains it, and the age is at most k - min_version.
        With S = 0 batch p // G has no other groups to choose from.
    backlog-14: While admission is tightened to s < S, the same holds with S, since fewer groups are admitted at any
        moment than without. A ticket that is admitted then is sampled by version p // G - s or a newer one, if the
        generator has the newest weights; its `min_version` stays that of S, so that a replay gives the same tickets.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The rule of one run by which groups start."""

    groups_per_step: int
    max_staleness: int
    steps: int | None = None
    """Training steps of the run; None for an endless run."""
    tightened: int | None = None
    """A lower bound for admission alone; None is `max_staleness`."""

    def admits(self, position: int, policy_version: int) -> bool:
        """Whether a ticket at this position may be admitted now (backlog-1)."""
        bound = self.max_staleness if self.tightened is None else min(self.tightened, self.max_staleness)  # backlog-14
        last_step = policy_version + bound + 1
        if self.steps is not None:
            last_step = min(last_step, self.steps)
        return position < last_step * self.groups_per_step

    def min_version(self, position: int) -> int:
        """The oldest version that may sample a ticket admitted at this position (backlog-2)."""
        return max(0, position // self.groups_per_step - self.max_staleness)

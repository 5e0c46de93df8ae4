"""The trainer in virtual time: one step after another, slower while engines work on the same machine."""

from collections.abc import Callable

import numpy as np

from goaly.simulator.clock import Clock
from goaly.simulator.profile import TrainingTimes


class Trainer:
    """Takes training steps."""

    def __init__(
        self,
        clock: Clock,
        times: TrainingTimes,
        random: np.random.Generator,
        *,
        speed: float,
        slowdown: float,
        ended: Callable[[], None],
    ):
        """`speed` is that of this trainer as a share of the profile's. While all engines are busy a step takes
        `slowdown` times as long. `ended` is called after each step."""
        self._clock = clock
        self._times = times
        self._random = random
        self._speed = speed
        self._slowdown = slowdown
        self._ended = ended
        self._load = 0.0
        self._factor = 1.0
        self._work = 0.0
        """Seconds that the step still needs at full speed."""
        self._since = 0.0
        self._planned = 0
        self.is_busy = False
        self.busy_seconds = 0.0

    def step(self, rank_tokens: int) -> None:
        """Train a batch whose busiest rank has so many tokens."""
        times = self._times
        noise = max(0.05, 1 + times.spread * float(self._random.standard_normal()))
        self._work = (times.fixed_seconds + times.seconds_per_token * rank_tokens) * noise / self._speed
        self._since = self._clock.now
        self.is_busy = True
        self._plan()

    def load(self, busy_share: float) -> None:
        """This share of the engines is busy from now on."""
        self._load = busy_share
        if self.is_busy and self._slowdown > 1:
            self._advance()
            self._plan()

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        self.busy_seconds += passed
        self._work -= passed / self._factor

    def _plan(self) -> None:
        self._factor = 1 + (self._slowdown - 1) * self._load
        self._planned += 1
        self._clock.at(self._clock.now + max(0.0, self._work) * self._factor, self._end, self._planned)

    def _end(self, planned: int) -> None:
        if planned == self._planned:
            self._advance()
            self.is_busy = False
            self._ended()

"""Failures of scoring: the reward of a response without a score, or the error that fails its group, and counts.

Errors become a reward of 0 only with `on_error=zero`, and at most `ERRORS_IN_A_ROW` of them in a row. A reward of 0 in
place of a missing score is an `Unscored`, never a plain number.
"""

import logging
from dataclasses import dataclass
from typing import Any, Literal

from goaly.prompts.prompt import Prompt
from goaly.reward.settings import RewardSettings
from goaly.reward.verifier_process import VerifierError

logger = logging.getLogger(__name__)

ERRORS_IN_A_ROW = 64
"""With `on_error: zero`, the verifier counts as broken after more errors in a row than this."""


class RewardTimeout(VerifierError):
    """A verifier exceeded the time limit."""


class Unscored(float):
    """The reward 0 of a response without a score, and the cause."""

    cause: Literal["error", "timeout"]

    def __new__(cls, cause: Literal["error", "timeout"]) -> "Unscored":
        zero = super().__new__(cls, 0.0)
        zero.cause = cause
        return zero

    def __reduce__(self) -> tuple[Any, ...]:
        return Unscored, (self.cause,)


@dataclass(slots=True, kw_only=True)
class RewardStats:
    """Counts of a pool."""

    scores: int = 0
    """Responses that got a score from the verifier."""
    timeouts: int = 0
    errors: int = 0
    replaced: int = 0
    """Processes that were killed or died, and were replaced."""


class Failures:
    """Decides about the failures of one verifier, and counts them."""

    def __init__(self, settings: RewardSettings, verifier: str):
        """`verifier` is what messages call it."""
        self._settings = settings
        self._verifier = verifier
        self._in_a_row = 0
        self.stats = RewardStats()

    def scored(self) -> None:
        """Count a score."""
        self.stats.scores += 1
        self._in_a_row = 0

    def ran_out(self, prompt: Prompt) -> Unscored | RewardTimeout:
        """The reward of a response whose score exceeded the time limit, or the error that fails its group."""
        self.stats.timeouts += 1
        limit = self._settings.time_limit_seconds
        why = f"prompt {prompt.id}: the verifier exceeded reward.time_limit_seconds={limit:g}"
        logger.warning("%s", why)
        return Unscored("timeout") if self._settings.on_time_limit == "zero" else RewardTimeout(why)

    def failed(self, prompt: Prompt, why: str) -> Unscored | VerifierError:
        """The reward of a response whose score failed, or the error that fails its group."""
        self.stats.errors += 1
        self._in_a_row += 1
        error = VerifierError(f"prompt {prompt.id}: {self._verifier}: {why}")
        if self._settings.on_error == "fail":
            return error
        if self._in_a_row <= ERRORS_IN_A_ROW:
            logger.warning("reward 0, because reward.on_error is zero: %s", error)
            return Unscored("error")
        return VerifierError(f"{error} ({self._in_a_row} errors in a row: too many for reward.on_error=zero)")

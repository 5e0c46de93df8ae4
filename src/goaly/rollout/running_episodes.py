"""Running episodes: what each is doing now, and its time limit.

rollout-3: An episode that ignores its time limit delays neither its group's report nor another episode: `within`
    ends at most `CANCEL_SECONDS` after its limit or its own cancellation. Work that still runs then is abandoned: a
    warning is logged, and its result is dropped.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from goaly.agents.session import Session, SessionEnd
from goaly.base.errors import EpisodeError
from goaly.base.telemetry.metrics import counting
from goaly.generate.policy import Policy
from goaly.reward.failures import Unscored

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAITING, GENERATING, JUDGED, OWN_CODE, DONE = (
    "waiting for a place",
    "generating",
    "being judged",
    "in the episode's own code",
    "done",
)

CANCEL_SECONDS = 10.0
"""Time for an episode to clean up after it was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """The progress of a group's episodes."""

    seconds: float
    """Since the group began."""
    doing: Mapping[str, int]
    """The number of episodes by activity."""

    def __str__(self) -> str:
        doing = dict(self.doing)
        done = doing.pop(DONE, 0)
        others = ", ".join(f"{count} {what}" for what, count in doing.items())
        return f"{done} of {done + sum(doing.values())} episodes done" + (f", {others}" if others else "")


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """One running episode of a group."""

    policy: Policy
    sample_index: int
    attempt: int = field(default=0, init=False)
    """How often it has begun again."""
    session: Session | None = field(default=None, init=False)
    """The conversation of this attempt, once it has begun."""
    why: str | None = field(default=None, init=False)
    """The error that ended this attempt."""
    is_cut_off: bool = field(default=False, init=False)
    """Whether a limit ended it before its script or its agent gave a reward."""
    was_held_up: bool = field(default=False, init=False)
    """Whether time ran out while its policy was idle, or after it had been idle for most of it: its own code, a tool,
    an environment or a verifier took the time."""
    _began: float = field(default=0.0, init=False)
    _first: Policy = field(init=False)
    _stage: str = field(default=WAITING, init=False)
    _judging: int = field(default=0, init=False)
    is_unjudged: bool = field(default=False, init=False)
    """Whether one of its responses has no score: its verifier failed, or had not given it when time ran out."""
    is_unscored: bool = field(default=False, init=False)
    """Whether one of its responses has reward 0 in place of a score."""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """Counts of events in it, in all attempts, by the name of the metric."""

    def __post_init__(self) -> None:
        self._first = self.policy

    def begin(self, attempt: int) -> None:
        """Make this attempt the one that runs, with a policy of its own: requests, key and seeds have its number, so
        nothing that an earlier attempt asked for can reach it (rollout-5)."""
        self.attempt, self.is_unjudged, self.is_unscored, self.why = attempt, False, False, None
        if attempt:
            first, number = self._first, f"retry{attempt}"
            seeds = None if first.seeds is None else f"{first.seeds}.{number}"
            self.policy = replace(first, name=f"{first.name}.{number}", seeds=seeds)

    @property
    def is_late(self) -> bool:
        """Whether its time limit has ended this attempt."""
        return self.session is not None and self.session.ended is SessionEnd.TIMED_OUT

    def ran_out_of_time(self) -> None:
        """Note whose time it was; it is about to be cancelled."""
        seconds = asyncio.get_running_loop().time() - self._began
        self.was_held_up = not self.policy.generating or 2 * self.policy.generating_seconds < seconds
        self.is_unjudged |= self._judging > 0

    @property
    def doing(self) -> str:
        """Its current activity."""
        if self._stage != OWN_CODE:
            return self._stage
        if self.policy.generating:
            return GENERATING
        return JUDGED if self._judging else OWN_CODE

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The block in which the episode runs; its policy ends with it."""
        self._stage, self._began = OWN_CODE, asyncio.get_running_loop().time()
        with counting(self.counts):
            try:
                yield
                self._stage = DONE
            finally:
                self.policy.end()

    async def judged(self, score: Awaitable[float]) -> float:
        """Await the score of one of its responses."""
        self._judging += 1
        attempt = self.attempt
        try:
            value = await score  # Unblocked by the verifier or its time limit.
        except Exception:
            if attempt == self.attempt:  # what an earlier attempt left behind says nothing of this one
                self.is_unjudged = True
            raise
        finally:
            self._judging -= 1
        if isinstance(value, Unscored):
            self.is_unscored |= attempt == self.attempt
            self.counts[f"reward/verifier_{value.cause}s"] += 1
        return value


@dataclass(slots=True, eq=False)
class RunningGroup:
    """The episodes of one group."""

    episodes: Sequence[RunningEpisode]
    _began: float = field(default_factory=time.monotonic, init=False)

    @property
    def done(self) -> int:
        """The number of episodes that are done."""
        return sum(episode.doing == DONE for episode in self.episodes)

    @property
    def counts(self) -> dict[str, int]:
        """The sums of its episodes' counts."""
        counts = Counter[str]()
        for episode in self.episodes:
            counts.update(episode.counts)
        return dict(+counts)

    def progress(self) -> GroupProgress:
        """The progress of the episodes."""
        doing = Counter(episode.doing for episode in self.episodes)
        return GroupProgress(seconds=time.monotonic() - self._began, doing=dict(doing))


class Failed(float):
    """The reward 0 of an evaluation's episode that failed, and why."""

    def __new__(cls, why: str) -> "Failed":
        zero = super().__new__(cls, 0.0)
        zero.why = why
        return zero

    why: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Failed, (self.why,)


class EvaluationFailed(EpisodeError):
    """An evaluation has no result: a response has no score, or too many episodes in a row failed."""


class EpisodeTimeout(EpisodeError):
    """An episode exceeded `rollout.episode_seconds`."""

    reason = "episode_timeout"
    """The reason of the failure in the run's accounting."""


class GroupTimeout(EpisodeError):
    """A group exceeded `rollout.group_seconds`."""

    reason = "group_timeout"


_abandoned: set[asyncio.Task[Any]] = set()


async def within(
    seconds: float | None, work: Coroutine[Any, Any, T], name: str, on_late: Callable[[], None] | None = None
) -> T:
    """The result or error of the work; EpisodeTimeout if it takes longer than the limit (None: no limit). `on_late` is
    called before late work is cancelled."""
    task = asyncio.create_task(work, name=name)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            if on_late is not None:
                on_late()
            raise EpisodeTimeout(f"{name} exceeded rollout.episode_seconds={seconds}")
        if task.cancelled():
            raise EpisodeError(f"{name} cancelled itself")
        return task.result()
    except asyncio.CancelledError:
        if task.done():
            _report_end(task)  # it ended at the moment of the cancellation
        raise
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_report_end)
            try:
                await asyncio.wait([task], timeout=CANCEL_SECONDS)  # rollout-3
            finally:
                if not task.done():
                    logger.warning("%s still runs %g s after it was cancelled, and is abandoned", name, CANCEL_SECONDS)
                    _abandoned.add(task)
                    task.add_done_callback(_abandoned.discard)


def _report_end(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("%s ended after it was cancelled: %s: %s", task.get_name(), type(error).__name__, error)

"""The progress of running groups: what each episode is doing now."""

import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from goaly.reward.verifiers import Unscored
from goaly.rollout.policy import Policy

WAITING, GENERATING, JUDGED, OWN_CODE, DONE = (
    "waiting for a place",
    "generating",
    "being judged",
    "in the episode's own code",
    "done",
)


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
    _started: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _judging: int = field(default=0, init=False)
    unscored: Counter[str] = field(default_factory=Counter, init=False)
    """The number of its responses that got reward 0 without a score, by cause."""

    @property
    def doing(self) -> str:
        """Its current activity."""
        if self._ended:
            return DONE
        if not self._started:
            return WAITING
        if self.policy.generating:
            return GENERATING
        return JUDGED if self._judging else OWN_CODE

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The block in which the episode runs; its policy ends with it."""
        self._started = True
        try:
            yield
            self._ended = True
        finally:
            self.policy.end()

    async def judged(self, score: Awaitable[float]) -> float:
        """Await the score of one of its responses."""
        self._judging += 1
        try:
            value = await score  # Unblocked by the verifier or its time limit.
        finally:
            self._judging -= 1
        if isinstance(value, Unscored):
            self.unscored[value.cause] += 1
        return value


class RunningGroup:
    """The episodes of one group."""

    def __init__(self, episodes: Sequence[RunningEpisode]):
        self.episodes = tuple(episodes)
        self._began = time.monotonic()

    @property
    def done(self) -> int:
        """The number of episodes that are done."""
        return sum(episode.doing == DONE for episode in self.episodes)

    def unscored(self, cause: str) -> int:
        """The number of responses that got reward 0 without a score, for this cause."""
        return sum(episode.unscored[cause] for episode in self.episodes)

    def progress(self) -> GroupProgress:
        """The progress of the episodes."""
        doing = Counter(episode.doing for episode in self.episodes)
        return GroupProgress(seconds=time.monotonic() - self._began, doing=dict(doing))

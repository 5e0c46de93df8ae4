"""What the episodes of a group are doing at the moment, for whoever asks why the group takes so long."""

import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from goaly.reward.verifiers import Unscored
from goaly.rollout.policy import RoutedPolicy

WAITING, GENERATING, JUDGED, OWN_CODE, DONE = (
    "waiting for a place",
    "generating",
    "being judged",
    "in the episode's own code",
    "done",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a group's episodes are."""

    seconds: float
    """Since the group began."""
    doing: Mapping[str, int]
    """How many of its episodes are doing what."""

    def __str__(self) -> str:
        doing = dict(self.doing)
        done = doing.pop(DONE, 0)
        others = ", ".join(f"{count} {what}" for what, count in doing.items())
        return f"{done} of {done + sum(doing.values())} episodes done" + (f", {others}" if others else "")


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """One sample of a group on its way."""

    policy: RoutedPolicy
    sample_index: int
    _started: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _judging: int = field(default=0, init=False)
    unscored: Counter[str] = field(default_factory=Counter, init=False)
    """Its responses that got reward 0 because the verifier did not score them, by the cause."""

    @property
    def doing(self) -> str:
        """What it is doing."""
        if self._ended:
            return DONE
        if not self._started:
            return WAITING
        if self.policy.generating:
            return GENERATING
        return JUDGED if self._judging else OWN_CODE

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The episode runs inside this block; its policy ends with it."""
        self._started = True
        try:
            yield
            self._ended = True
        finally:
            self.policy.end()

    async def judged(self, score: Awaitable[float]) -> float:
        """The score of one of its responses, which is with the verifier meanwhile."""
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
        """How many of them are done."""
        return sum(episode.doing == DONE for episode in self.episodes)

    def unscored(self, cause: str) -> int:
        """How many of their responses got reward 0 because the verifier did not score them, for this cause."""
        return sum(episode.unscored[cause] for episode in self.episodes)

    def progress(self) -> GroupProgress:
        """How far they are."""
        doing = Counter(episode.doing for episode in self.episodes)
        return GroupProgress(seconds=time.monotonic() - self._began, doing=dict(doing))

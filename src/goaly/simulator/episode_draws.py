"""The episodes of each group, drawn from a profile."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from goaly.simulator.profile import Distribution, EpisodesProfile, EpisodeTimes, StatedEpisodes

DRAWN_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """One answer of the policy, and the time after it."""

    prompt_tokens: int
    answer_tokens: int
    environment_seconds: float


@dataclass(frozen=True, slots=True)
class DrawnEpisode:
    """An episode that will be simulated."""

    turns: tuple[DrawnTurn, ...]
    overhead_seconds: float
    verifier_seconds: float
    tokens: int
    """Tokens of its trajectory: prompts and answers."""
    answer_tokens: int


class EpisodeDraws:
    """Draws groups."""

    def __init__(self, profile: EpisodesProfile, group_size: int, random: np.random.Generator):
        self._group_size = group_size
        self._random = random
        self._measured = [[_measured(one) for one in group] for group in profile.groups]
        self._stated = None if profile.stated is None else _StatedDraws(profile.stated, random)
        self._no_signal_share = profile.no_signal_share

    def group(self) -> list[DrawnEpisode]:
        """The episodes of the next group."""
        if self._stated is not None:
            return self._stated.group(self._group_size)
        group = self._measured[int(self._random.integers(len(self._measured)))]
        if len(group) == self._group_size:
            return group
        return [group[at] for at in self._random.integers(len(group), size=self._group_size)]

    def has_signal(self) -> bool:
        """Whether dynamic sampling keeps the next group."""
        return self._no_signal_share == 0 or self._random.random() >= self._no_signal_share


def _measured(one: EpisodeTimes) -> DrawnEpisode:
    seconds = one.environment_seconds or (0.0,) * len(one.answer_tokens)
    turns = tuple(DrawnTurn(*turn) for turn in zip(one.prompt_tokens, one.answer_tokens, seconds, strict=True))
    return _episode(turns, one.overhead_seconds, one.verifier_seconds)


def _episode(turns: tuple[DrawnTurn, ...], overhead_seconds: float, verifier_seconds: float) -> DrawnEpisode:
    answers = sum(turn.answer_tokens for turn in turns)
    prompts = sum(turn.prompt_tokens for turn in turns)
    return DrawnEpisode(turns, overhead_seconds, verifier_seconds, prompts + answers, answers)


class _StatedDraws:
    """Draws episodes of stated distributions."""

    def __init__(self, stated: StatedEpisodes, random: np.random.Generator):
        def draw(distribution: Distribution) -> Callable[[], float]:
            return _Values(distribution, random)

        self._turns, self._prompt = draw(stated.turns), draw(stated.prompt_tokens)
        self._observation, self._answer = draw(stated.observation_tokens), draw(stated.answer_tokens)
        self._environment, self._verifier = draw(stated.environment_seconds), draw(stated.verifier_seconds)
        self._overhead = draw(stated.overhead_seconds)

    def group(self, size: int) -> list[DrawnEpisode]:
        prompt = round(self._prompt())
        return [self._one(prompt) for _ in range(size)]

    def _one(self, prompt: int) -> DrawnEpisode:
        count = max(1, round(self._turns()))
        turns = tuple(
            DrawnTurn(
                prompt if number == 0 else round(self._observation()),
                max(1, round(self._answer())),
                self._environment() if number < count - 1 else 0.0,
            )
            for number in range(count)
        )
        return _episode(turns, self._overhead(), self._verifier())


class _Values:
    """Values of a distribution, drawn many at a time."""

    def __init__(self, distribution: Distribution, random: np.random.Generator):
        self._distribution, self._random = distribution, random
        self._drawn: list[float] = []

    def __call__(self) -> float:
        if not self._drawn:
            self._drawn = self._draw()
        return self._drawn.pop()

    def _draw(self) -> list[float]:
        known = self._distribution
        if known.samples:
            return self._random.choice(np.array(known.samples), DRAWN_AT_ONCE).tolist()
        if known.sigma == 0 or known.mean == 0:
            values = np.full(DRAWN_AT_ONCE, known.mean)
        else:
            median = np.log(known.mean) - known.sigma**2 / 2
            values = self._random.lognormal(median, known.sigma, DRAWN_AT_ONCE)
        return (values if known.most is None else np.minimum(values, known.most)).tolist()

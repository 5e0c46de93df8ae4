"""Mixes prompts of several sources in shares that may change during the run.

Each source is a stream with its own position. The mixing is by credit: with every prompt each source earns its share,
and the source with the most credit gives the prompt and pays 1. This needs no randomness, and any stretch of the
mixture has the right shares. The next prompt depends only on the seed and the weights set so far (prompts-3). A source
of weight 0 gives no prompt and keeps its credit until it has a weight again.

    prompts-4: With n sources, none of them at weight 0, the number of prompts from each differs by less than n from the
        sum of its shares.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from goaly.prompts.curriculum import Curriculum, Passes
from goaly.prompts.files import read_prompts
from goaly.prompts.prompt import Prompt, Split
from goaly.prompts.settings import PromptSettings
from goaly.prompts.stream import Distinct, Exhausted, PromptStream


class Mixture:
    """The prompts of one split, from one source or several, without end."""

    def __init__(
        self,
        streams: Mapping[str, PromptStream],
        weights: Mapping[str, float],
        curriculum: Curriculum | None = None,
    ):
        self._streams = dict(streams)
        self._curriculum = curriculum
        self._credits = dict.fromkeys(streams, 0.0)
        self._weights: dict[str, float] = dict.fromkeys(streams, 0.0)
        self._shares: dict[str, float] = {}
        self.latest = ""
        """The source of the last prompt."""
        self.set_weights(weights)

    @property
    def position(self) -> int:
        """The number of prompts given so far."""
        return sum(stream.position for stream in self._streams.values())

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source from the next prompt on, with the curriculum's factors."""
        return dict(self._shares)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of these sources from the next prompt on; other sources keep theirs."""
        for source, weight in weights.items():
            if source not in self._streams:
                raise ValueError(f"weight of {source}: no such prompt source; known are {', '.join(self._streams)}")
            if not 0 <= weight < math.inf:
                raise ValueError(f"weight of {source}={weight}: must be a number of at least 0")
        wanted = {**self._weights, **weights}
        if not any(wanted.values()):
            raise ValueError(f"weights of {', '.join(wanted)}: one must be above 0")
        self._weights = wanted
        self._share()

    def learn(self, passes: Mapping[str, Passes]) -> None:
        """Update the curriculum, if there is one, with the passes of each source."""
        if self._curriculum is not None:
            self._curriculum.observe(passes)
            self._share()

    def next(self) -> Prompt:
        """The next prompt."""
        for source, share in self._shares.items():
            self._credits[source] += share
        mixed = [name for name, share in self._shares.items() if share > 0]
        self.latest = max(mixed, key=self._credits.__getitem__)
        self._credits[self.latest] -= 1  # prompts-4
        return self._streams[self.latest].next()

    def state_dict(self) -> dict[str, Any]:
        """The position of every source, and the state of the mixing."""
        return {
            "streams": {name: stream.state_dict() for name, stream in self._streams.items()},
            "weights": dict(self._weights),
            "credits": dict(self._credits),
            "curriculum": None if self._curriculum is None else self._curriculum.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state of the same sources."""
        if list(state["streams"]) != list(self._streams):
            raise ValueError(
                f"prompt sources are {', '.join(self._streams)}, but the saved state has {', '.join(state['streams'])}"
            )
        if (state["curriculum"] is None) != (self._curriculum is None):
            there = "none" if state["curriculum"] is None else "one"
            raise ValueError(f"prompts.curriculum: the saved state has {there}; a resumed run must have the same")
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])
        self._weights = {name: float(state["weights"][name]) for name in self._streams}
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"])
        self._share()
        self._credits = {name: float(state["credits"][name]) for name in self._streams}

    def _share(self) -> None:
        factors = {name: self._curriculum.factor(name) if self._curriculum else 1.0 for name in self._streams}
        weights = {name: self._weights[name] * factors[name] for name in self._streams}
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}


def prompt_mixture(settings: PromptSettings, split: Split = Split.TRAIN) -> Mixture:
    """The mixture that the settings describe; a single source without a name is called `prompts`."""
    streams = {
        name: PromptStream(alone, split, name if settings.sources else None)
        for name, alone in each_source(settings).items()
    }
    curriculum = Curriculum(streams, settings.curriculum) if settings.curriculum and split is Split.TRAIN else None
    return Mixture(streams, _source_weights(settings), curriculum)


def each_source(settings: PromptSettings) -> dict[str, PromptSettings]:
    """The settings of each source, by name, as if it were the only one."""
    if not settings.sources:
        return {"prompts": settings}
    return {
        source.name: replace(
            settings,
            **source.of_source(),
            sources=(),
            curriculum=None,
            seed=_seed(settings.seed, source.name),
        )
        for source in settings.sources
    }


def distinct_prompts(settings: PromptSettings, split: Split, count: int | None) -> tuple[Prompt, ...]:
    """The first `count` different problems of a split in the sources' shares, or all if there are fewer or `count` is
    None. Every run of these settings gets the same ones."""
    seen: set[tuple[str, str | None]] = set()
    streams = {
        name: Distinct(alone, split, name if settings.sources else None, seen)
        for name, alone in each_source(settings).items()
    }
    weights = {name: weight for name, weight in _source_weights(settings).items() if weight > 0}
    found: list[Prompt] = []
    mixture = Mixture(streams, weights)
    while weights and (count is None or len(found) < count):
        try:
            found.append(mixture.next())
        except Exhausted:
            del weights[mixture.latest]
            if weights:
                mixture.set_weights({mixture.latest: 0.0})
    return tuple(found)


def unreadable(settings: PromptSettings) -> str | None:
    """Why the prompt files, or the records at their beginnings, can't be read; None if they can."""
    try:
        for alone in each_source(settings).values():
            read_prompts(alone.files, alone.columns, distinct=alone.distinct, reader=alone.reader)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def with_tools(settings: PromptSettings) -> bool:
    """Whether a prompt at the beginnings of the prompt files has tools."""
    sources = each_source(settings).values()
    return any(one.tools for alone in sources for one in read_prompts(alone.files, alone.columns, reader=alone.reader))


def empty_split(settings: PromptSettings, split: Split) -> str | None:
    """Why a split has no prompts; None if it has some. Every training source must have some; of the held-out split one
    source is enough."""
    reasons = {}
    for name, alone in each_source(settings).items():
        try:
            PromptStream(alone, split).next()
        except Exhausted as error:
            reasons[name] = str(error)
    if not reasons or (split is Split.HELD_OUT and len(reasons) < len(each_source(settings))):
        return None
    return "; ".join(f"{name}: {why}" if settings.sources else why for name, why in reasons.items())


def _source_weights(settings: PromptSettings) -> dict[str, float]:
    return {source.name: source.weight for source in settings.sources} or {"prompts": 1.0}


def _seed(seed: int, source: str) -> int:
    """A seed for this source, so that two sources of the same kind draw differently."""
    return int.from_bytes(blake2b(f"{seed}/{source}".encode(), digest_size=6).digest(), "big")

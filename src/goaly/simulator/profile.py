"""A profile: the measured service times of trainer, engines, episodes and weights, as `profile.json`.

A forecast has no other numbers. `read_profile` checks a file, and `write_profile` writes one. Where the numbers come
from is for whoever makes it: a minute of measurement, the log of a run (`run_profile.py`), or published rates.

Tokens of a training step are those of the data-parallel rank that has the most. An engine is one replica.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, MinLen

from goaly.base.atomic_files import put_file
from goaly.base.config.check import check
from goaly.base.config.schema import plain
from goaly.base.config.settings import (
    AtLeastOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Settings,
    ShareBelowOne,
)
from goaly.base.errors import ConfigError
from goaly.generate.settings import GeneratorSettings
from goaly.train.settings import RanksSettings

VERSION = 1
"""The version of the file's form."""

Divided = TypeVar("Divided", "TrainingTimes", "EngineTimes")


class Distribution(Settings):
    """Values that are drawn independently: `samples`, or a lognormal distribution of this mean."""

    samples: tuple[NonNegativeFloat, ...] = ()
    """Measured values, each as likely as the others; empty uses the keys below."""
    mean: NonNegativeFloat = 0.0
    """Mean value, before `most` cuts it."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of the value's logarithm; 0 makes every value the mean. With 1 the mean is 1.6 times the
    median, and one value in a hundred is above 6 times the mean."""
    most: PositiveFloat | None = None
    """Greatest value: greater ones become it, as answers at their token limit do. Null has no limit."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.samples:
            yield from at.idle(f"{at}samples are given", "mean", "sigma", "most")


class TrainingTimes(Settings):
    """A training step of these ranks: `fixed_seconds + seconds_per_token * tokens`."""

    pp: PositiveInt = 1
    """Pipeline stages."""
    fsdp: PositiveInt = 1
    """Data-parallel ranks."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    cp: PositiveInt = 1
    """Context-parallel ranks."""
    ep: PositiveInt = 1
    """Expert-parallel ranks."""
    fixed_seconds: NonNegativeFloat = 0.0
    """Seconds of a step whatever its tokens: the optimizer's, and those of collectives."""
    seconds_per_token: PositiveFloat
    """Seconds for a token, prompts included, of the data-parallel rank that has the most."""
    spread: NonNegativeFloat = 0.0
    """Standard deviation of one step's seconds around this line, as a share of them."""
    uncertainty: ShareBelowOne = 0.0
    """Standard error of the line, as a share of its seconds: it widens the intervals of forecasts."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.pp * self.fsdp * self.tp * self.cp


class DecodeRate(Settings):
    """The speed of an engine at one number of running sequences."""

    running: PositiveInt
    """Sequences that the engine decodes at once."""
    tokens_per_second: PositiveFloat
    """Tokens that it samples in a second, of all sequences together."""


class EngineTimes(Settings):
    """One replica of the generator."""

    tp: PositiveInt = 1
    """Tensor-parallel processes."""
    ep: PositiveInt = 1
    """Expert-parallel processes."""
    decode: tuple[DecodeRate, ...]
    """Rates by number of running sequences, which goes up. Between two points, and after the last, the time of a decode
    step is linear in the number; before the first it is that of the first."""
    prefill_tokens_per_second: PositiveFloat | None = None
    """Tokens of prompts that are computed in a second in which nothing is decoded; null takes no time."""
    seconds_per_request: NonNegativeFloat = 0.0
    """Seconds of the engine for each request, beside its tokens; nothing is decoded in them."""
    kv_tokens_per_gib: PositiveFloat | None = None
    """Tokens whose keys and values a GiB of the cache of each process holds; null is a cache without limit."""
    uncertainty: ShareBelowOne = 0.0
    """Standard error of the rates, as a share of them."""

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.decode:
            yield f"{at}decode: must have at least one point"
        numbers = [point.running for point in self.decode]
        if any(later <= before for before, later in pairwise(numbers)):
            yield f"{at}decode: `running` must go up from point to point, is {', '.join(map(str, numbers))}"

    def step_seconds(self, running: int) -> float:
        """The seconds of a decode step of so many sequences, each of which gets a token."""
        points = [(point.running, point.running / point.tokens_per_second) for point in self.decode]
        if running <= points[0][0] or len(points) == 1:
            # one point alone: more sequences than it has make a step longer in proportion
            return points[0][1] * max(1.0, running / points[0][0])
        above = next((number for number, point in enumerate(points) if point[0] >= running), len(points) - 1)
        (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
        slope = (high_seconds - low_seconds) / (high - low)
        return max(low_seconds + slope * (running - low), points[0][1])


class EpisodeTimes(Settings):
    """One measured episode: an item for each turn of the policy."""

    prompt_tokens: Annotated[tuple[NonNegativeInt, ...], MinLen(1)]
    """Tokens that are new before each answer: the prompt, then observations."""
    answer_tokens: Annotated[tuple[PositiveInt, ...], MinLen(1)]
    """Tokens of each answer."""
    environment_seconds: tuple[NonNegativeFloat, ...] = ()
    """Seconds of tools and environments after each answer; empty is none."""
    verifier_seconds: NonNegativeFloat = 0.0
    """Seconds for the reward."""
    overhead_seconds: NonNegativeFloat = 0.0
    """Seconds before the first request, such as those in which an environment starts."""

    def _problems(self, at: Section) -> Iterator[str]:
        turns = len(self.answer_tokens)
        if len(self.prompt_tokens) != turns:
            yield f"{at}prompt_tokens: has {len(self.prompt_tokens)} items, must have one for each of {turns} answers"
        if self.environment_seconds and len(self.environment_seconds) != turns:
            yield f"{at}environment_seconds: has {len(self.environment_seconds)} items, must have none or {turns}"


class StatedEpisodes(Settings):
    """Episodes by their distributions, where none were measured."""

    turns: Distribution = field(default_factory=lambda: Distribution(mean=1.0))
    """Answers of an episode; at least 1."""
    prompt_tokens: Distribution = field(default_factory=lambda: Distribution(mean=0.0))
    """Tokens of the prompt, the same for all samples of a group."""
    observation_tokens: Distribution = field(default_factory=lambda: Distribution(mean=0.0))
    """Tokens before each later answer."""
    answer_tokens: Distribution = field(default_factory=lambda: Distribution(mean=1.0))
    """Tokens of one answer; at least 1."""
    environment_seconds: Distribution = field(default_factory=lambda: Distribution(mean=0.0))
    """Seconds of tools and environments between two answers."""
    verifier_seconds: Distribution = field(default_factory=lambda: Distribution(mean=0.0))
    """Seconds for the reward."""
    overhead_seconds: Distribution = field(default_factory=lambda: Distribution(mean=0.0))
    """Seconds before the first request."""


class EpisodesProfile(Settings):
    """The episodes of a run: measured ones by group, or stated distributions."""

    groups: tuple[tuple[EpisodeTimes, ...], ...] = ()
    """Measured groups; a forecast draws whole groups, because samples of one prompt are alike."""
    stated: StatedEpisodes | None = None
    """Distributions in place of measured groups."""
    no_signal_share: ShareBelowOne = 0.0
    """Share of groups that `backlog.dynamic_sampling` rejects."""

    def _problems(self, at: Section) -> Iterator[str]:
        if bool(self.groups) == (self.stated is not None):
            yield f"{at}groups: must have measured groups, or {at}stated must have distributions, and not both"
        if any(not group for group in self.groups):
            yield f"{at}groups: group {[bool(group) for group in self.groups].index(False)} has no episodes"


class UpdateTimes(Settings):
    """A new policy version on its way from the trainer to an engine."""

    stage_seconds: NonNegativeFloat = 0.0
    """Seconds for which the trainer copies its weights, and does not train."""
    pull_seconds: NonNegativeFloat = 0.0
    """Seconds that a replica copies them while it decodes."""
    apply_seconds: NonNegativeFloat = 0.0
    """Seconds for which a replica decodes nothing, to put them in place."""


class LoopTimes(Settings):
    """The parts of a run that are neither trainer nor engine."""

    step_seconds: NonNegativeFloat = 0.0
    """Seconds of the training loop beside the step and the staging of weights: metrics, messages, checkpoints."""
    batch_seconds: NonNegativeFloat = 0.0
    """Seconds from the moment in which a batch is formed until the trainer works on it."""
    ticket_seconds: NonNegativeFloat = 0.0
    """Seconds from a group's admission until its first request."""
    answer_seconds: NonNegativeFloat = 0.0
    """Seconds of an answer's way to its episode and of a request's to the engine, together."""
    group_seconds: NonNegativeFloat = 0.0
    """Seconds from a group's last reward until it can be in a batch."""
    trainer_slowdown: AtLeastOne = 1.0
    """Factor of the trainer's seconds while engines are busy, where both share cores or memory."""
    engine_slowdown: AtLeastOne = 1.0
    """Factor of an engine's seconds while the trainer is busy."""


class Profile(Settings):
    """The service times of a run's parts."""

    version: Annotated[int, Ge(1)] = VERSION
    """Version of the form of this file."""
    source: str = ""
    """Where the numbers are from, such as `runs/grpo-tiny on 2 cores`."""
    device: Literal["cpu", "cuda"] | None = None
    """Device of the measurement; null is unknown."""
    training: tuple[TrainingTimes, ...]
    """Training steps, for each parallelism that was measured."""
    engines: tuple[EngineTimes, ...]
    """Replicas of the generator, for each parallelism that was measured."""
    episodes: EpisodesProfile
    """Lengths, turns and waits of episodes."""
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    """Weight updates."""
    loop: LoopTimes = field(default_factory=LoopTimes)
    """The rest of a step, and what the two sides cost each other."""

    def _problems(self, at: Section) -> Iterator[str]:
        if self.version != VERSION:
            yield f"{at.version}: must be {VERSION}, the form that this goaly reads; make the profile again"
        for key in ("training", "engines"):
            if not getattr(self, key):
                yield f"{at}{key}: must have at least one measurement"

    def training_at(self, ranks: RanksSettings) -> TrainingTimes:
        """The times of a trainer with these axes, of the measured ones that differ in `fsdp` at most; the nearest.
        ConfigError if none was measured."""
        return _measured(self.training, ranks, ("pp", "tp", "cp", "ep"), "training", lambda one: one.fsdp - ranks.fsdp)

    def engine_at(self, generator: GeneratorSettings) -> EngineTimes:
        """The rates of a replica with these axes. ConfigError if none was measured."""
        return _measured(self.engines, generator, ("tp", "ep"), "engines", lambda one: 0)


def _measured(found: Sequence[Divided], asked: Any, axes: tuple[str, ...], key: str, distance: Any) -> Divided:
    fits = [one for one in found if all(getattr(one, axis) == getattr(asked, axis) for axis in axes)]
    if not fits:
        wanted = ", ".join(f"{axis}={getattr(asked, axis)}" for axis in axes)
        known = "; ".join(", ".join(f"{axis}={getattr(one, axis)}" for axis in axes) for one in found)
        raise ConfigError([f"profile {key}: has no measurement of {wanted}; it has {known}"])
    return min(fits, key=lambda one: abs(distance(one)))


def read_profile(file: Path) -> Profile:
    """The profile in this file; ConfigError with every problem."""
    try:
        values = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError([f"{file}: must be the JSON of a profile: {error}"]) from error
    if not isinstance(values, dict):
        raise ConfigError([f"{file}: must be the JSON of a profile, is a {type(values).__name__}"])
    if values.get("version") != VERSION:
        found = values.get("version")
        raise ConfigError([f"{file}: version={found}: must be {VERSION}, the form that this goaly reads"])
    profile, problems = check(Profile, values)
    if problems:
        raise ConfigError([f"{file}: {problem}" for problem in problems])
    return profile


def write_profile(file: Path, profile: Profile) -> None:
    """Write the profile to this file."""
    put_file(file, json.dumps(plain(profile), indent=1).encode() + b"\n")

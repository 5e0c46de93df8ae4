"""A forecast: what a run will do, each number with the interval in which 19 of 20 such runs are expected."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from goaly.simulator.gains import Lever, gains_of
from goaly.simulator.profile import Profile
from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.simulation import Simulation
from goaly.simulator.steady_part import SteadyPart

SEEDS = 5
LEAST_GAIN = 0.02
"""A part that saves less of a step is no bottleneck."""

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's 97.5 % quantile for 1, 2, ... degrees of freedom; the last one serves all above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A number, and the interval of it for one run."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Expected":
        """The prediction interval from simulated runs of different seeds, none of which may be below 0."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean=mean, low=mean, high=mean)
        quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
        half = quantile * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
        return cls(mean=mean, low=max(0.0, mean - half), high=mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The steady part of a run: without its first steps, and without the last ones, in which no group starts."""

    step_seconds: Expected
    tokens_per_second: Expected
    """Tokens of trained sequences, prompts included."""
    trainer_idle: Expected
    """Share of the time in which the trainer neither trains nor copies weights."""
    generator_idle: Expected
    """Share of the time in which an engine has no sequence to decode, the mean of all replicas."""
    staleness_mean: Expected
    """Mean age of trained tokens, in policy versions."""
    staleness_p95: Expected
    """Age that one trained token in twenty exceeds."""
    running: Expected
    """Sequences that engines decode at once, of all replicas, the mean over time."""
    queued: Expected
    """Finished groups that wait for their batch when one is formed, beside those of the batch."""
    gpus: int
    """Ranks of the trainer and processes of the replicas."""
    gains: Mapping[Lever, float]
    """The share of a step's seconds that would be saved if a part were a fifth faster, or a limit twice as high."""
    max_age: int
    """Greatest age of a trained token in any of the simulated runs."""

    @property
    def bottleneck(self) -> Lever | None:
        """The part that would save the most; None if no part alone saves much."""
        part, gain = max(self.gains.items(), key=lambda one: one[1])
        return part if gain >= LEAST_GAIN else None

    @property
    def tokens_per_second_per_gpu(self) -> Expected:
        """Trained tokens for each rank and engine process."""
        one = self.tokens_per_second
        return Expected(mean=one.mean / self.gpus, low=one.low / self.gpus, high=one.high / self.gpus)

    def __str__(self) -> str:
        idle = [f"{100 * one.mean:.0f} % ({100 * one.low:.0f} to {100 * one.high:.0f})" for one in self._idle]
        lines = (
            f"seconds a step     {self.step_seconds}",
            f"tokens a second    {self.tokens_per_second}, {self.tokens_per_second_per_gpu} for each of "
            f"{self.gpus} ranks and engine processes",
            f"trainer idle       {idle[0]}",
            f"generator idle     {idle[1]}",
            f"staleness          mean {self.staleness_mean}, 95 % below {self.staleness_p95}, at most {self.max_age}",
            f"running sequences  {self.running}",
            f"queued groups      {self.queued}",
            f"bottleneck         {'none: no part alone saves much' if self.bottleneck is None else self.bottleneck}",
            *(f"  {part.change:33s} {100 * gain:+5.1f} % of a step saved" for part, gain in self.gains.items()),
        )
        return "\n".join(lines)

    @property
    def _idle(self) -> tuple[Expected, Expected]:
        return self.trainer_idle, self.generator_idle


def simulate(profile: Profile, run: SimulatedRun, *, seeds: int = SEEDS, first_seed: int = 0) -> Forecast:
    """The forecast of this run from simulations with so many seeds. ConfigError if the profile has no measurement of
    its parallelism."""
    found = [SteadyPart.of(run, Simulation(profile, run, first_seed + seed).run()) for seed in range(seeds)]

    def estimate(name: str) -> Expected:
        return Expected.of([getattr(one, name) for one in found])

    return Forecast(
        step_seconds=estimate("step_seconds"),
        tokens_per_second=estimate("tokens_per_second"),
        trainer_idle=estimate("trainer_idle"),
        generator_idle=estimate("generator_idle"),
        staleness_mean=estimate("staleness_mean"),
        staleness_p95=estimate("staleness_p95"),
        running=estimate("running"),
        queued=estimate("queued"),
        gains=gains_of(profile, run, first_seed, found[0]),
        gpus=run.gpus,
        max_age=max(one.max_age for one in found),
    )

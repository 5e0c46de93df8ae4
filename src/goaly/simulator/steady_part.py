"""The steady part of a simulated run, and its numbers."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from goaly.simulator.simulated_run import SimulatedRun
from goaly.simulator.simulation import SimulatedStep

WARM_STEPS = 5
"""Steps at the start, in which the queue fills."""


def steady(states: Sequence[SimulatedStep], max_staleness: int) -> Sequence[SimulatedStep]:
    """The states after each step, without the first ones and without the end, in which no new group starts; the last
    two if that leaves none."""
    kept = states[WARM_STEPS : len(states) - max_staleness - 1]
    return kept if len(kept) > 1 else states[-2:]


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyPart:
    """The numbers of one simulated run."""

    step_seconds: float
    tokens_per_second: float
    trainer_idle: float
    generator_idle: float
    staleness_mean: float
    staleness_p95: float
    running: float
    queued: float
    max_age: int

    @classmethod
    def of(cls, run: SimulatedRun, states: Sequence[SimulatedStep]) -> "SteadyPart":
        """The numbers of a run that went through these states."""
        kept = steady(states, run.backlog.max_staleness)
        first, last = kept[0], kept[-1]
        seconds = last.at - first.at
        ages = sum((step.ages for step in kept[1:]), Counter[int]())
        total = sum(ages.values())
        return cls(
            step_seconds=seconds / (len(kept) - 1),
            tokens_per_second=sum(step.tokens for step in kept[1:]) / seconds,
            trainer_idle=_idle(last.trainer_seconds - first.trainer_seconds, seconds),
            generator_idle=_idle(last.engine_seconds - first.engine_seconds, seconds),
            staleness_mean=sum(age * tokens for age, tokens in ages.items()) / total,
            staleness_p95=_quantile(ages, 0.95),
            running=(last.running_seconds - first.running_seconds) / seconds,
            queued=statistics.fmean(step.queued for step in kept[1:]),
            max_age=max(max(step.ages) for step in states[1:]),
        )


def _idle(busy_seconds: float, seconds: float) -> float:
    return max(0.0, 1 - busy_seconds / seconds)


def _quantile(ages: Counter[int], share: float) -> float:
    reached, total = 0.0, sum(ages.values())
    for age in sorted(ages):
        reached += ages[age]
        if reached >= share * total:
            return float(age)
    return float(max(ages))

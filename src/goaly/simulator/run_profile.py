"""A profile from the records of runs: their metrics and spans say how long trainer, engines and episodes took.

Several runs of one machine give a better profile than one: with different batches the trainer's line is known, with
different numbers of running sequences the engine's, and with runs in which one side waits for the other, how much each
slows the other down.

Lines are fitted by least squares over stretches of a run of about a second, weights not below 0.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from goaly.base.errors import ConfigError
from goaly.simulator.intervals import Interval, Union
from goaly.simulator.profile import (
    DecodeRate,
    EngineTimes,
    EpisodesProfile,
    EpisodeTimes,
    LoopTimes,
    Profile,
    TrainingTimes,
    UpdateTimes,
)
from goaly.simulator.run_records import RunRecords, SampledAnswer

WARM_STEPS = 3
"""Steps at the start that say nothing of later ones: caches fill, kernels are compiled."""
STRETCH_SECONDS = 1.0
SLOWDOWNS = np.arange(1.0, 3.01, 0.05)
"""Factors that are tried for how much one side slows the other down."""
EXACT = 1e-6
"""Mean squared error of a line that needs no slowdown."""
MOST_ERROR = 0.8
"""A slowdown that leaves a greater share of the squared error is chance: it counts as none."""
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of running sequences for which the engine's rate is noted."""
MOST_GROUPS = 500


def profile_of_runs(folders: Sequence[Path]) -> Profile:
    """The profile of these runs, which must have the same model and parallelism."""
    runs = [RunRecords.read(folder) for folder in folders]
    training, trainer_slowdown = _training(runs)
    engine, engine_slowdown = _engine(runs)
    return Profile(
        source=", ".join(map(str, folders)),
        training=(training,),
        engines=(engine,),
        episodes=_episodes(runs[0]),
        updates=_updates(runs),
        loop=_loop(runs, trainer_slowdown, engine_slowdown),
    )


def profile_of_run(folder: Path) -> Profile:
    """The profile of one run."""
    return profile_of_runs([folder])


# training


def _training(runs: Sequence[RunRecords]) -> tuple[TrainingTimes, float]:
    """The line of the trainer's steps, and how much busy engines slow it down."""
    tokens, seconds, shares, owners = [], [], [], []
    for owner, run in enumerate(runs):
        busy = Union(answer.at_engine for answer in run.answers)
        for number, work in run.trained.items():
            if number >= WARM_STEPS and number < len(run.steps):
                tokens.append(run.steps[number]["step/tokens"] / run.run.trainer.fsdp)
                seconds.append(work.seconds)
                shares.append(busy.within(work) / work.seconds)
                owners.append(owner)
    fit = _fit(np.column_stack([np.ones(len(tokens)), tokens]), np.array(seconds), np.array(shares), owners)
    ranks = runs[0].run.trainer
    training = TrainingTimes(
        pp=ranks.pp,
        fsdp=ranks.fsdp,
        tp=ranks.tp,
        cp=ranks.cp,
        ep=ranks.ep,
        fixed_seconds=fit.weights[0],
        seconds_per_token=max(fit.weights[1], 1e-9),
        spread=fit.spread,
        uncertainty=fit.uncertainty,
    )
    return training, fit.slowdown


@dataclass(frozen=True, slots=True)
class _Fit:
    """A line, and how much another side that works at the same time stretches it."""

    weights: list[float]
    slowdown: float
    spread: float
    """Standard deviation of the values around the line, as a share of them."""
    uncertainty: float
    """That of whole runs around it."""


def _fit(columns: np.ndarray, values: np.ndarray, shares: np.ndarray, owners: Sequence[int]) -> _Fit:
    """The line `columns @ weights * (1 + (slowdown - 1) * share)` whose relative errors are least; no slowdown where
    it explains little."""
    tried = []
    for slowdown in SLOWDOWNS:
        scaled = columns * ((1 + (slowdown - 1) * shares) / values)[:, None]
        weights, error = _positive(scaled)
        tried.append((error, float(slowdown), weights))
    error, slowdown, weights = min(tried, key=lambda one: one[0])
    if error > MOST_ERROR * tried[0][0] or tried[0][0] < EXACT * len(values):
        error, slowdown, weights = tried[0]
    spread = float(np.sqrt(error / len(values)))
    found = columns @ np.array(weights) * (1 + (slowdown - 1) * shares)
    level = float(values.sum() / found.sum())  # relative errors draw the line to the lower values
    weights = [level * weight for weight in weights]
    ratios = level * found / values
    by_run = [float(ratios[np.array(owners) == owner].mean()) for owner in sorted(set(owners))]
    between = statistics.stdev(by_run) if len(by_run) > 1 else 0.0
    return _Fit(weights, slowdown, spread, min(0.5, max(between, spread / float(np.sqrt(len(values))))))


def _positive(scaled: np.ndarray) -> tuple[list[float], float]:
    """The weights, none below 0, with which the columns come closest to 1; and the squared error."""
    best: tuple[list[float], float] | None = None
    count = scaled.shape[1]
    for chosen in product((False, True), repeat=count):
        if not any(chosen):
            continue
        part = scaled[:, np.array(chosen)]
        found, *_ = np.linalg.lstsq(part, np.ones(len(scaled)), rcond=None)
        error = float(((part @ found - 1) ** 2).sum())
        if (found >= 0).all() and (best is None or error < best[1]):
            values = iter(found.tolist())
            best = [next(values) if one else 0.0 for one in chosen], error
    assert best is not None, "a single column of positive values has a positive weight"
    return best


# engines


def _engine(runs: Sequence[RunRecords]) -> tuple[EngineTimes, float]:
    """The rates of a replica, and how much a busy trainer slows it down."""
    columns, seconds, shares, owners = [], [], [], []
    for owner, run in enumerate(runs):
        for stretch in _stretches(run):
            columns.append([stretch.steps, stretch.tokens, stretch.requests])
            seconds.append(stretch.active_seconds)
            shares.append(stretch.trainer_share)
            owners.append(owner)
    if not seconds:
        raise ConfigError([f"the runs are too short: none decodes for {STRETCH_SECONDS:g} s after step {WARM_STEPS}"])
    fit = _fit(np.array(columns), np.array(seconds), np.array(shares), owners)
    per_step, per_token, per_request = fit.weights
    settings = runs[0].run.generator
    points = [number for number in POINTS if number < settings.most_running] + [settings.most_running]
    engine = EngineTimes(
        tp=settings.tp,
        ep=settings.ep,
        decode=tuple(
            DecodeRate(running=number, tokens_per_second=number / max(1e-9, per_step + per_token * number))
            for number in points
        ),
        seconds_per_request=per_request,
        uncertainty=fit.uncertainty,
    )
    return engine, fit.slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """About a second of a run, all replicas together."""

    steps: float
    tokens: float
    requests: float
    active_seconds: float
    """Seconds in which a replica had something to decode, without its updates."""
    trainer_share: float
    """The share of the time in which the trainer worked."""


def _stretches(run: RunRecords) -> Iterator[_Stretch]:
    running = [Interval(run.began(answer), answer.at_engine.stop) for answer in run.answers]
    by_replica: dict[str, list[Interval]] = defaultdict(list)
    for answer, interval in zip(run.answers, running, strict=True):
        by_replica[answer.replica].append(interval)
    active = [Union(intervals) for intervals in by_replica.values()]
    training = Union(run.trained.values())
    first = WARM_STEPS
    for last in range(WARM_STEPS + 1, len(run.steps) - run.run.backlog.max_staleness):
        when = Interval(run.reported(first), run.reported(last))
        if when.seconds < STRETCH_SECONDS:
            continue
        before, after = run.steps[first], run.steps[last]
        done = [when.overlap(interval) / max(interval.seconds, 1e-9) for interval in running]
        stalled = after["generator/stall_seconds"] - before["generator/stall_seconds"]
        yield _Stretch(
            steps=after["generator/steps"] - before["generator/steps"],
            tokens=sum(share * answer.tokens for share, answer in zip(done, run.answers, strict=True)),
            requests=sum(when.start <= interval.start < when.stop for interval in running),
            active_seconds=max(1e-9, sum(one.within(when) for one in active) - stalled),
            trainer_share=training.within(when) / when.seconds,
        )
        first = last


# episodes


def _episodes(run: RunRecords) -> EpisodesProfile:
    """The groups of a run, up to the first one that has not ended: later ones would be the short ones."""
    by_ticket: dict[int, dict[str, list[SampledAnswer]]] = defaultdict(lambda: defaultdict(list))
    for answer in run.answers:
        by_ticket[answer.ticket][answer.sample].append(answer)
    groups = []
    verifier = statistics.fmean(run.reward_seconds) if run.reward_seconds else 0.0
    for ticket in sorted(by_ticket)[:MOST_GROUPS]:
        if ticket not in run.queued:
            break
        groups.append(tuple(_episode(answers, verifier) for answers in by_ticket[ticket].values()))
    if not groups:
        raise ConfigError(["the run has no group that ended"])
    return EpisodesProfile(groups=tuple(groups))


def _episode(answers: list[SampledAnswer], verifier_seconds: float) -> EpisodeTimes:
    answers = sorted(answers, key=lambda answer: answer.turn)
    said = [0, *(answer.prompt_tokens + answer.tokens for answer in answers)]
    waits = [later.asked.start - before.asked.stop for before, later in pairwise(answers)]
    return EpisodeTimes(
        prompt_tokens=tuple(max(0, answer.prompt_tokens - known) for answer, known in zip(answers, said, strict=False)),
        answer_tokens=tuple(max(1, answer.tokens) for answer in answers),
        environment_seconds=(*(max(0.0, wait) for wait in waits), 0.0),
        verifier_seconds=verifier_seconds,
    )


# the way of a version, and the rest of the loop


def _updates(runs: Sequence[RunRecords]) -> UpdateTimes:
    staged = [one.seconds for run in runs for one in run.published.values()]
    pulled = [wait for run in runs for wait in run.pull_seconds()]
    stalls = sum(run.steps[-1]["generator/stall_seconds"] for run in runs)
    updates = sum(run.steps[-1]["generator/updates"] for run in runs)
    apply_seconds = stalls / max(1.0, updates)
    return UpdateTimes(
        stage_seconds=statistics.median(staged),
        pull_seconds=max(0.0, statistics.median(pulled) - apply_seconds) if pulled else 0.0,
        apply_seconds=apply_seconds,
    )


def _loop(runs: Sequence[RunRecords], trainer_slowdown: float, engine_slowdown: float) -> LoopTimes:
    def median(found: Iterable[float]) -> float:
        known = list(found)
        return max(0.0, statistics.median(known)) if known else 0.0

    staged = median(one.seconds for run in runs for one in run.published.values())
    verified = median(one for run in runs for one in run.reward_seconds)
    return LoopTimes(
        step_seconds=max(0.0, median(gap for run in runs for gap in run.gaps_of_ready_batches()) - staged),
        batch_seconds=median(gap for run in runs for gap in run.batch_waits()),
        ticket_seconds=median(gap for run in runs for gap in run.ticket_waits()),
        answer_seconds=median(one.asked.seconds - one.at_engine.seconds for run in runs for one in run.answers),
        group_seconds=max(0.0, median(gap for run in runs for gap in run.group_waits()) - verified),
        trainer_slowdown=trainer_slowdown,
        engine_slowdown=engine_slowdown,
    )

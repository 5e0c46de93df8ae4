"""The limit of a run, the changes that should help and by how much, from the run's own metrics.

    python -m goaly.plan.advise runs/NAME

It reads the run's folder only, so the run may be under way, finished or dead. While something is broken (groups without
signal, truncated answers, failures, stalls) it says that and nothing about tuning: a low utilization is then a symptom.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from goaly.base.errors import ConfigError
from goaly.simulator.forecast import Forecast, simulate
from goaly.simulator.run_evidence import RunEvidence
from goaly.simulator.run_profile import profile_of_run
from goaly.simulator.run_records import RunRecords

NO_SIGNAL, TRUNCATED, FAILED = 0.5, 0.25, 0.05
"""Shares from which on groups without signal, truncated answers and failures mean that something is broken."""
STALL_FACTOR, STALL_SECONDS = 6.0, 1800.0
"""A phase that takes longer than both, in medians of a step and in seconds, is a stall."""
BUSY = 0.85
"""A side that works for this share of a step limits it."""
REST = 0.25
"""Share of a step, spent neither training nor waiting, above which it limits the run."""
AT_ENGINES = 0.5
"""If a smaller share of the episodes under way is at the engines, environments and verifiers have the others."""
ROOMY = 0.6
SIMULATED_STEPS = 60
LEAST_HELP = 0.03
"""A change that saves less of a step is not worth a line."""


class LimitedBy(StrEnum):
    """The part of a run that bounds the seconds of a step."""

    TRAINER = "the trainer"
    GENERATOR = "the generator"
    WEIGHTS = "new weights and the rest of the training loop"
    STALENESS = "the staleness bound"
    WINDOW = "the window"
    EPISODES = "environments and verifiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of settings."""

    settings: str
    why: str
    seconds: float
    """Expected seconds of a step."""


def broken(run: RunEvidence) -> Iterator[str]:
    """One line for each sign that something is wrong with the run itself."""
    status = run.summary.get("status")
    if status == "failed":
        yield "the run failed; its logs and `python -m goaly.journal list` say why"
    median = statistics.median(after["step/seconds"] for _, after in run.pairs)
    for seconds, what in ((run.silent_seconds, "since the newest step"), (run.longest_step_seconds, "in one step")):
        if seconds > max(STALL_SECONDS, STALL_FACTOR * median):
            yield f"a stall: {seconds:.0f} s {what}, the median step takes {median:.1f} s"
    samples = run.backlog.groups_per_step * run.backlog.group_size
    shares = (
        ("groups/no_signal_share", 1, NO_SIGNAL, "of the groups have no signal: all samples have the same reward"),
        ("length/truncated_share", 1, TRUNCATED, "of the answers are truncated: a limit ended them"),
        ("reward/verifier_errors", samples, FAILED, "of the answers have reward 0 because the verifier failed"),
        ("reward/verifier_timeouts", samples, FAILED, "of the answers have reward 0 because the verifier was late"),
        ("agents/sessions_timed_out", samples, FAILED, "of the sessions exceeded their time limit"),
        ("agents/sessions_abandoned", samples, FAILED, "of the sessions were abandoned"),
        ("rollout/episode_retries", samples, FAILED, "of the episodes began again because their environment failed"),
    )
    for key, whole, most, what in shares:
        if (share := (run.mean(key) or 0.0) / whole) >= most:
            yield f"{100 * share:.0f} % {what} ({key})"
    if run.failed_share >= FAILED:
        yield f"{100 * run.failed_share:.0f} % of the groups failed (`reasons` in summary.json)"
    if failed := run.mean("evaluation/failed"):
        yield f"evaluations failed (evaluation/failed, {failed:.0f})"


def limit_of(run: RunEvidence) -> LimitedBy:
    """The part that bounds the seconds of this run's steps."""
    whole, backlog = run.step_seconds, run.backlog
    if run.train_seconds >= BUSY * whole:
        return LimitedBy.TRAINER
    if run.engine_seconds >= BUSY * whole:
        return LimitedBy.GENERATOR
    if run.rest_seconds >= REST * whole and run.rest_seconds > run.wait_seconds:
        return LimitedBy.WEIGHTS
    if backlog.order == "windowed" and (run.mean("backlog/queued") or 0.0) >= backlog.groups_per_step:
        return LimitedBy.WINDOW
    if backlog.max_staleness > 0 and _share_at_engines(run) < AT_ENGINES:
        return LimitedBy.EPISODES
    return LimitedBy.STALENESS


def changes(run: RunEvidence, limit: LimitedBy) -> list[Change]:
    """The changes that should help, the most helpful first."""
    found = [
        change
        for change in _candidates(run, limit)
        if change.seconds < (1 - LEAST_HELP) * run.step_seconds or "auto" in change.settings
    ]
    return sorted(found, key=lambda change: change.seconds)


def _candidates(run: RunEvidence, limit: LimitedBy) -> Iterator[Change]:
    whole, train, engine = run.step_seconds, run.train_seconds + run.rest_seconds, run.engine_seconds
    generator, backlog = run.generator, run.backlog
    both = max(train, engine)
    if limit in (LimitedBy.TRAINER, LimitedBy.GENERATOR):
        yield from _moved(run)
    if limit is LimitedBy.TRAINER:
        more, ranks = run.trainer.fsdp + 1, run.trainer.fsdp
        why = f"one more data-parallel rank, the generator stays: {100 * engine / whole:.0f} % of a step is its work"
        seconds = max(run.train_seconds * ranks / more + run.rest_seconds, engine)
        yield Change(settings=f"trainer.fsdp={more}", why=why, seconds=seconds)
    elif limit is LimitedBy.GENERATOR:
        more = generator.replicas + 1
        seconds = max(train, engine * generator.replicas / more)
        yield Change(settings=f"generator.replicas={more}", why="one more replica", seconds=seconds)
    elif limit is LimitedBy.STALENESS:
        more = 2 * backlog.max_staleness or 1
        why = "generation and training overlap more; at best a step takes as long as the slower side"
        yield Change(settings=f"backlog.max_staleness={more}", why=why, seconds=both)
    elif limit is LimitedBy.WINDOW:
        why = "finished groups wait behind a slow one; at best a step takes as long as the slower side"
        yield Change(settings=f"backlog.window={2 * backlog.window}", why=why, seconds=both)
    elif limit is LimitedBy.EPISODES:
        share = 100 * (1 - _share_at_engines(run))
        why = f"{share:.0f} % of the episodes under way are at no engine: faster environments, or more of them at once"
        yield Change(settings=f"backlog.max_staleness={2 * backlog.max_staleness}", why=why, seconds=both)
    elif limit is LimitedBy.WEIGHTS:
        why = "new weights, the reference model, evaluations or checkpoints hold the training loop up (trace.json)"
        yield Change(settings="fewer of them in the loop", why=why, seconds=whole - run.rest_seconds)
    yield from _room(run, limit)


def _room(run: RunEvidence, limit: LimitedBy) -> Iterator[Change]:
    """Limits of what runs at once."""
    most, queued = run.generator.most_running, run.mean("generator/queued") or 0.0
    if run.generator.max_running == "auto" or limit not in (LimitedBy.GENERATOR, LimitedBy.STALENESS):
        return
    preempted = run.rise("generator/preemptions")
    if preempted > FAILED * run.backlog.groups_per_step * run.backlog.group_size:
        why = f"{preempted:.1f} preemptions in a step: the key-value cache is too small for {most} requests at once"
        yield Change(settings="generator.max_running=auto", why=why, seconds=run.step_seconds)
    elif run.running >= 0.9 * most and queued > 0 and (run.cache_use or 1.0) < ROOMY:
        why = (
            f"{queued:.0f} requests wait while {most} run, and {100 * (run.cache_use or 0):.0f} % of the cache is used"
        )
        yield Change(settings="generator.max_running=auto", why=why, seconds=run.step_seconds)


def _moved(run: RunEvidence) -> Iterator[Change]:
    """The best split of the same ranks, in whole replicas and whole data-parallel ranks."""
    trainer, generator = run.trainer, run.generator
    unit = trainer.ranks // trainer.fsdp
    ranks = trainer.ranks + generator.replicas * generator.tp
    work, sampled = run.train_seconds * trainer.fsdp, run.engine_seconds * generator.replicas
    splits = []
    for fsdp in range(1, ranks // unit + 1):
        replicas = (ranks - fsdp * unit) // generator.tp
        if replicas > 0:
            splits.append((max(work / fsdp + run.rest_seconds, sampled / replicas), fsdp, replicas))
    seconds, fsdp, replicas = min(splits)
    if (fsdp, replicas) != (trainer.fsdp, generator.replicas):
        why = f"the same {ranks} ranks in balance"
        yield Change(settings=f"trainer.fsdp={fsdp} generator.replicas={replicas}", why=why, seconds=seconds)


def _share_at_engines(run: RunEvidence) -> float:
    """Share of the episodes under way that an engine works on, the mean over time."""
    under_way = (run.mean("backlog/running") or 0.0) * run.backlog.group_size
    at_engines = run.running * run.generator.replicas * run.engine_seconds / run.step_seconds
    queued = run.mean("generator/queued") or 0.0
    return min(1.0, (at_engines + queued) / under_way) if under_way else 1.0


def forecast_of(folder: Path) -> Forecast | None:
    """The simulation of this run, with its own records as the profile; None if it has too few of them."""
    try:
        run = RunRecords.read(folder).run
        return simulate(profile_of_run(folder), run.of_steps(SIMULATED_STEPS), seeds=3)
    except ConfigError:
        return None


def report(run: RunEvidence, forecast: Forecast | None = None) -> str:
    """The advice as text; with a `forecast` also the effects that it expects."""
    whole = run.step_seconds
    lines = [
        f"{run.name}: {run.steps} steps, {len(run.pairs)} of them compared, {whole:.3g} s a step "
        f"(± {run.step_seconds_error:.2g})"
    ]
    if found := list(broken(run)):
        lines += ["something is broken; mend it before you tune anything:", *(f"  {line}" for line in found)]
        return "\n".join(lines)
    parts = (run.train_seconds, run.wait_seconds, run.rest_seconds, run.engine_seconds)
    train, wait, rest, engine = (f"{100 * seconds / whole:.0f} %" for seconds in parts)
    at_once = ""
    if run.running > 0:
        at_once = f", on {run.running:.3g} requests at once in each of {run.generator.replicas} replicas"
    if run.cache_use is not None:
        at_once += f", with {100 * run.cache_use:.0f} % of the cache"
    age, oldest = run.mean("age/mean") or 0.0, run.mean("age/max") or 0.0
    limit = limit_of(run)
    lines += [
        f"  trainer    works for {train} of a step, waits for its batch for {wait}, does other things for {rest}",
        f"  generator  works for {engine} of a step{at_once}",
        f"  age        {age:.2f} versions on average, {oldest:.1f} at most; "
        f"{run.mean('backlog/running') or 0.0:.1f} groups run and {run.mean('backlog/queued') or 0.0:.1f} wait",
        f"limited by {limit}",
    ]
    helpful = changes(run, limit)
    if not helpful:
        lines.append("no single change of the settings should save more than 3 % of a step")
    for change in helpful:
        saved = 100 * (1 - change.seconds / whole)
        effect = f"{change.seconds:.3g} s a step, {saved:.0f} % less" if saved > 0 else "the effect is not known"
        lines.append(f"  {change.settings}: {effect} ({change.why})")
    if forecast is not None:
        lines.append(f"the simulator, with this run as its profile, expects {forecast.step_seconds} s a step")
        gains = sorted(forecast.gains.items(), key=lambda one: -one[1])
        lines += [f"  {part.change}: {100 * gain:.0f} % less" for part, gain in gains if gain >= LEAST_HELP]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and the run, print the advice."""
    parser = argparse.ArgumentParser(prog="python -m goaly.plan.advise", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    chosen = parser.parse_args(arguments)
    try:
        run = RunEvidence.of(chosen.run)
        sys.stdout.write(report(run, None if any(broken(run)) else forecast_of(chosen.run)) + "\n")
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

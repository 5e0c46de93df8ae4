"""The records of a run that tell how long its parts took: metrics of its steps, and spans of all its processes.

Times are in seconds on the clock that the processes of a host share.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from goaly.backlog.settings import BacklogSettings
from goaly.base.config import RUN_CONFIG
from goaly.base.config.check import check
from goaly.base.config.run_file import run_values
from goaly.base.errors import ConfigError
from goaly.base.json_text import read_lines
from goaly.base.telemetry.metrics import METRICS_FILE
from goaly.base.telemetry.perfetto import FinishedSpan, read_spans
from goaly.generate.settings import GeneratorSettings
from goaly.rollout.settings import RolloutSettings
from goaly.simulator.intervals import Interval
from goaly.simulator.simulated_run import SimulatedRun
from goaly.train.settings import TrainerSettings

SECTIONS = {
    "backlog": BacklogSettings,
    "generator": GeneratorSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One request of a trained episode."""

    ticket: int
    sample: str
    """The episode, by its number in the group and the number of its attempt."""
    turn: int
    prompt_tokens: int
    tokens: int
    asked: Interval
    """As its rollout worker saw it."""
    replica: str
    at_engine: Interval
    """As the replica saw it, with the time before it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The records of a run."""

    run: SimulatedRun
    steps: Sequence[Mapping[str, float]]
    """The metrics of each step."""
    trained: Mapping[int, Interval]
    """The trainer's work on each batch, until its last rank was done."""
    published: Mapping[int, Interval]
    """The publishing of each version."""
    applied: Mapping[tuple[str, int], float]
    """When each replica had each version in place."""
    formed: Mapping[int, float]
    """When each batch was formed."""
    queued: Mapping[int, float]
    """When each group was complete."""
    batches: Mapping[int, Sequence[int]]
    """The tickets of each batch."""
    answers: Sequence[SampledAnswer]
    reward_seconds: Sequence[float]
    """How long verifiers took."""
    started: float
    """When the clock of the metrics was 0."""

    @classmethod
    def read(cls, folder: Path) -> "RunRecords":
        """The records in the folder of a run. ConfigError if it has none."""
        for needed in (RUN_CONFIG, METRICS_FILE):
            if not (folder / needed).exists():
                raise ConfigError([f"{folder}: must be the folder of a run; it has no {needed}"])
        steps = list(read_lines(folder / METRICS_FILE))
        by_name: dict[str, list[FinishedSpan]] = defaultdict(list)
        for one in read_spans(folder):
            by_name[one.name].append(one)
        if not by_name["train"] or not by_name["generation"]:
            raise ConfigError([f"{folder}: has no spans of training and generation, from which a profile is made"])
        if len(steps) < LEAST_STEPS:
            raise ConfigError([f"{folder}: has {len(steps)} steps, a profile needs at least {LEAST_STEPS}"])
        published = _by_number(by_name["publish"], "version")
        formed, queued, batches = _batches(by_name["queue_wait"])
        return cls(
            run=_settings(folder, len(steps)),
            steps=steps,
            trained=_by_number(by_name["train"], "batch"),
            published=published,
            applied={(one.process, int(one.args["version"])): one.stop_ns / 1e9 for one in by_name["apply"]},
            formed=formed,
            queued=queued,
            batches=batches,
            answers=list(_answers(by_name["generation"])),
            reward_seconds=[_interval(one).seconds for one in by_name["reward"]],
            started=statistics.median(
                when.stop - steps[version - 1]["run/seconds"]
                for version, when in published.items()
                if 0 < version <= len(steps)
            ),
        )

    def reported(self, step: int) -> float:
        """When the metrics of this step were recorded."""
        return self.started + self.steps[step]["run/seconds"]

    def min_version(self, ticket: int) -> int:
        """The oldest version that may sample this ticket; without dropped tickets."""
        backlog = self.run.backlog
        return max(0, ticket // backlog.groups_per_step - backlog.max_staleness)

    def began(self, answer: SampledAnswer) -> float:
        """When the replica could begin to sample an answer: it may have waited for weights."""
        version = self.min_version(answer.ticket)
        applied = self.applied.get((answer.replica, version), 0.0) if version else 0.0
        return min(max(answer.at_engine.start, applied), answer.at_engine.stop)

    def pull_seconds(self) -> list[float]:
        """For each version, the time from its publishing until a replica puts it in place."""
        waits = []
        for (_, version), at in self.applied.items():
            if version in self.published:
                waits.append(max(0.0, at - self.published[version].stop))
        return waits

    def gaps_of_ready_batches(self) -> Iterator[float]:
        """For each batch that was complete before the trainer was done, the time until it was formed."""
        for number, tickets in self.batches.items():
            before = self.trained.get(number - 1)
            if before is not None and max(self.queued[ticket] for ticket in tickets) < before.stop:
                yield self.formed[number] - before.stop

    def batch_waits(self) -> Iterator[float]:
        """For each batch, the time from its forming until it is trained."""
        for number, at in self.formed.items():
            if number in self.trained:
                yield self.trained[number].start - at

    def ticket_waits(self) -> Iterator[float]:
        """For each group that had to wait for a version, the time from that until its first request."""
        first: dict[int, float] = {}
        for answer in self.answers:
            first[answer.ticket] = min(first.get(answer.ticket, answer.asked.start), answer.asked.start)
        for ticket, asked in first.items():
            version = ticket // self.run.backlog.groups_per_step - self.run.backlog.max_staleness
            if version in self.published:
                yield asked - self.published[version].stop

    def group_waits(self) -> Iterator[float]:
        """For each group, the time from its last answer until it was queued."""
        last: dict[int, float] = {}
        for answer in self.answers:
            last[answer.ticket] = max(last.get(answer.ticket, 0.0), answer.asked.stop)
        for ticket, at in last.items():
            if ticket in self.queued:
                yield self.queued[ticket] - at


LEAST_STEPS = 10


def _settings(folder: Path, steps: int) -> SimulatedRun:
    values = run_values(folder, "backlog")
    found = {}
    for name, schema in SECTIONS.items():
        found[name], problems = check(schema, values.get(name) or {}, name)
        if problems:
            raise ConfigError(problems)
    return SimulatedRun(steps=max(steps, int(values["steps"])), **found)


def _interval(span: FinishedSpan) -> Interval:
    return Interval(span.start_ns / 1e9, span.stop_ns / 1e9)


def _by_number(found: Iterable[FinishedSpan], number: str) -> dict[int, Interval]:
    """From the first start on any rank to the last stop, by this number."""
    by_number: dict[int, Interval] = {}
    for one in found:
        key, now = int(one.args[number]), _interval(one)
        known = by_number.get(key, now)
        by_number[key] = Interval(min(known.start, now.start), max(known.stop, now.stop))
    return by_number


def _batches(waits: Iterable[FinishedSpan]) -> tuple[dict[int, float], dict[int, float], dict[int, list[int]]]:
    """When each batch was formed and each ticket queued, and the tickets of each batch: groups of one batch end to wait
    at the same time."""
    by_time: dict[int, list[int]] = defaultdict(list)
    queued = {}
    for one in waits:
        by_time[one.stop_ns].append(one.args["ticket"])
        queued[one.args["ticket"]] = one.start_ns / 1e9
    in_order = sorted(by_time)
    formed = {number: time / 1e9 for number, time in enumerate(in_order)}
    return formed, queued, {number: by_time[time] for number, time in enumerate(in_order)}


def _answers(generations: Sequence[FinishedSpan]) -> Iterable[SampledAnswer]:
    """Each request of a training episode that ended, from the spans of its two sides."""
    at_worker = {one.args["request"]: one for one in generations if "prompt_tokens" in one.args}
    for one in generations:
        asked = at_worker.get(one.args["request"])
        ticket, _, rest = str(one.args["request"]).partition(".")
        if "prompt_tokens" in one.args or asked is None or "tokens" not in one.args or not ticket.isdecimal():
            continue
        sample, _, turn = rest.rpartition(".")
        yield SampledAnswer(
            ticket=int(ticket),
            sample=sample,
            turn=int(turn),
            prompt_tokens=asked.args["prompt_tokens"],
            tokens=one.args["tokens"],
            asked=_interval(asked),
            replica=one.process,
            at_engine=_interval(one),
        )

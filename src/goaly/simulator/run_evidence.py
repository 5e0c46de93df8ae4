"""The facts of a run as its folder tells them, also while the run goes on: settings, metrics of its steps, its end.

The numbers are those of the steady part: without the first steps, in which the queue fills, and without the last ones
of a finished run, in which no group starts. Counters of a generator that was replaced begin again from 0, and a resumed
run pauses: pairs of steps around either do not count.
"""

import json
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

from goaly.backlog.settings import BacklogSettings
from goaly.base.config import RUN_CONFIG
from goaly.base.config.run_file import run_sections, run_values
from goaly.base.errors import ConfigError
from goaly.base.json_text import read_lines
from goaly.base.telemetry.metrics import METRICS_FILE
from goaly.generate.settings import GeneratorSettings
from goaly.train.settings import TrainerSettings

SECTIONS = {"backlog": BacklogSettings, "generator": GeneratorSettings, "trainer": TrainerSettings}
WARM_STEPS = 5
LEAST_STEPS = 4
"""Steps that the steady part must have."""
COUNTERS = ("generator/tokens", "generator/busy_seconds", "generator/stall_seconds", "run/seconds")
METRICS = ("step/seconds", "train_seconds", "run/seconds", "backlog/running", "generator/busy_seconds")
"""Metrics that every step of an RL run has."""

Step = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """A run's settings and measurements."""

    name: str
    backlog: BacklogSettings
    generator: GeneratorSettings
    trainer: TrainerSettings
    steps: int
    """The newest policy version."""
    pairs: tuple[tuple[Step, Step], ...]
    """Neighbours of the steady part."""
    summary: Mapping[str, Any]
    """How it ended; empty while it goes on."""
    silent_seconds: float
    """Seconds since its newest step; 0 after its end."""
    longest_step_seconds: float
    """Of all its steps."""

    @classmethod
    def of(cls, folder: Path, now: float | None = None) -> "RunEvidence":
        """The facts about the run in this folder. ConfigError if it has no metrics of enough steps."""
        settings = _settings(folder)
        file = folder / METRICS_FILE
        steps = list(read_lines(file)) if file.is_file() else []
        if steps and (missing := [key for key in METRICS if key not in steps[-1]]):
            raise ConfigError([f"{file}: has no {missing[0]}, must be the metrics of an RL run"])
        summary: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            summary = json.loads((folder / "summary.json").read_text())
        backlog: BacklogSettings = settings["backlog"]
        last = len(steps) - (backlog.max_staleness if summary.get("status") == "finished" else 0)
        kept = steps[WARM_STEPS:last]
        pairs = tuple((before, after) for before, after in pairwise(kept) if _follows(before, after))
        if len(pairs) < LEAST_STEPS:
            least = WARM_STEPS + LEAST_STEPS + 1
            raise ConfigError(
                [f"{file}: {len(pairs)} steps can be compared, must be at least {LEAST_STEPS} (a run of {least} steps)"]
            )
        silent = 0.0 if summary else (time.time() if now is None else now) - steps[-1]["time"]
        return cls(
            name=str(folder),
            steps=int(steps[-1]["policy_version"]),
            pairs=pairs,
            summary=summary,
            silent_seconds=max(0.0, silent),
            longest_step_seconds=max(step["step/seconds"] for step in steps[1:]),
            **settings,
        )

    def mean(self, key: str) -> float | None:
        """The mean of a metric over the steady steps that have it; None if none has."""
        found = [after[key] for _, after in self.pairs if after.get(key) is not None]
        return statistics.fmean(found) if found else None

    def rise(self, key: str) -> float:
        """By how much a counter goes up in a step, the mean."""
        return statistics.fmean(after.get(key, 0.0) - before.get(key, 0.0) for before, after in self.pairs)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.rise("run/seconds")

    @property
    def step_seconds_error(self) -> float:
        """Half of the interval of that mean at 95 %, as if steps were independent."""
        seconds = [after["run/seconds"] - before["run/seconds"] for before, after in self.pairs]
        return 2 * statistics.stdev(seconds) / sqrt(len(seconds)) if len(seconds) > 1 else 0.0

    @property
    def train_seconds(self) -> float:
        """Seconds in which the trainer computes, of a step."""
        return (self.mean("train_seconds") or 0.0) + (self.mean("rows_seconds") or 0.0)

    @property
    def wait_seconds(self) -> float:
        """Seconds for which the training loop waits for its batch; without a measurement, the rest of a step."""
        waited = self.mean("step/wait_seconds")
        return max(0.0, self.step_seconds - self.train_seconds) if waited is None else waited

    @property
    def rest_seconds(self) -> float:
        """Seconds of the training loop that are neither: new weights, the reference model, metrics."""
        return max(0.0, self.step_seconds - self.train_seconds - self.wait_seconds)

    @property
    def engine_seconds(self) -> float:
        """Seconds in which an engine computes or takes weights, of a step, the mean of all replicas."""
        busy = self.rise("generator/busy_seconds") + self.rise("generator/stall_seconds")
        return busy / self.generator.replicas

    @property
    def running(self) -> float:
        """Requests that an engine computes at once, the mean over its steps."""
        busy = self.rise("generator/busy_seconds")
        if busy > 0 and (weighted := self.rise("generator/running_seconds")) > 0:
            return weighted / busy
        return (self.mean("generator/running") or 0.0) / self.generator.replicas

    @property
    def cache_use(self) -> float | None:
        """Share of the key-value cache in use, the mean over the engine's steps; None if it was not measured."""
        busy, weighted = self.rise("generator/busy_seconds"), self.rise("generator/cache_seconds")
        return weighted / busy if busy > 0 and weighted > 0 else None

    @property
    def failed_share(self) -> float:
        """Share of the ended groups that failed; 0 while the run goes on."""
        ended = sum(self.summary.get(key) or 0 for key in ("trained", "rejected", "failed"))
        return (self.summary.get("failed") or 0) / ended if ended else 0.0


def _follows(before: Step, after: Step) -> bool:
    """Whether one is the step after the other, in the same processes."""
    grows = all(after.get(key, 0.0) >= before.get(key, 0.0) for key in COUNTERS)
    return grows and after["policy_version"] == before["policy_version"] + 1


def _settings(folder: Path) -> dict[str, Any]:
    if not (folder / RUN_CONFIG).is_file():
        raise ConfigError([f"{folder}: must be the folder of a run, which has a {RUN_CONFIG}"])
    return run_sections(run_values(folder, "backlog"), SECTIONS)

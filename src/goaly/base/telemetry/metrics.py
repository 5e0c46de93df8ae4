"""Writes metrics: each step as a line of `metrics.jsonl`, each evaluation as a line of `evaluations.jsonl`, and both as
TensorBoard events under `tensorboard/`; Weights & Biases gets them too if `telemetry.wandb` is set.

Metrics are on disk when the call returns, so a run that is killed loses none. Opening the files, before training, may
raise; writing does not (see `base/json_text.py`).
"""

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from goaly.base.json_text import LineFile, last_record
from goaly.base.telemetry.settings import TelemetrySettings
from goaly.base.telemetry.weights_and_biases import WandbRun

logger = logging.getLogger(__name__)

METRICS_FILE, EVALUATIONS_FILE = "metrics.jsonl", "evaluations.jsonl"


class MetricsWriter:
    """Writes a run's metrics into its folder."""

    def __init__(self, run_dir: str | Path, settings: TelemetrySettings):
        run_dir = Path(run_dir)
        self._lines = LineFile(run_dir / METRICS_FILE)
        self.newest: int = (last_record(self._lines.path) or {}).get("policy_version", 0)
        """The newest step that the run folder has metrics of."""
        self._evaluations = LineFile(run_dir / EVALUATIONS_FILE)
        self._events = TensorBoardEvents(run_dir / "tensorboard") if settings.tensorboard else None
        self._wandb = WandbRun(run_dir, settings.wandb) if settings.wandb is not None else None

    def step(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the step that made this policy version, once."""
        if policy_version > self.newest:
            self._write(self._lines, policy_version, metrics)
            self.newest = policy_version

    def evaluation(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation of this policy version."""
        self._write(self._evaluations, policy_version, metrics)

    def close(self, *, failed: bool = False) -> None:
        """Close all files, and finish the run of W&B, which may take seconds. `failed`: whether the run failed."""
        self._lines.close()
        self._evaluations.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)

    def _write(self, lines: LineFile, policy_version: int, metrics: Mapping[str, float]) -> None:
        now = time.time()
        lines.write({"policy_version": policy_version, "time": round(now, 3), **metrics})
        if self._events is not None:
            self._events.scalars(policy_version, metrics, now)
        if self._wandb is not None:
            self._wandb.log(policy_version, metrics)


class TensorBoardEvents:
    """One event file of scalars, in TensorBoard's record format.

    TensorBoard's own `EventFileWriter` sends events to a thread through a queue of ten, which blocks when it is full.
    One event a step is cheaper to write directly.
    """

    def __init__(self, folder: Path):
        # these imports take most of a second
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file: BinaryIO | None = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def scalars(self, policy_version: int, metrics: Mapping[str, float], wall_time: float) -> None:
        """Write one event with all numbers of a step."""
        if self._file is None:
            return
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, (int, float))
        ]
        event = self._event(wall_time=wall_time, step=policy_version, summary=self._summary(value=values))
        try:
            self._records.write(event.SerializeToString())
        except OSError as error:
            logger.warning("%s: TensorBoard events can't be written and end here: %s", self._file.name, error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a network file system may report a failed write again
                file.close()


_COUNTS: ContextVar[Counter[str] | None] = ContextVar("_COUNTS", default=None)


def count(name: str, times: int = 1) -> None:
    """Count something that has happened in the running episode. `name` is the metric, such as `game/wrong_moves`."""
    if (counts := _COUNTS.get()) is not None:
        counts[name] += times


@contextmanager
def counting(counts: Counter[str] | None = None) -> Iterator[Counter[str]]:
    """The block of an episode, with what is counted in it and in the tasks that it starts; added to these counts."""
    counts = Counter[str]() if counts is None else counts
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)

"""The metrics that a supervised run records and shows."""

import time

from apps.sft.config import SftConfig
from apps.sft.folder import SftFolder
from apps.sft.ranks import is_first_rank
from goaly.base.telemetry.metrics import MetricsWriter
from goaly.base.telemetry.progress import Progress
from goaly.trajectory import PackedRows


class Report:
    """Writes and shows a run's steps, on the first rank."""

    def __init__(self, config: SftConfig, folder: SftFolder):
        self._metrics = MetricsWriter(folder.run, config.telemetry) if is_first_rank() else None
        self._progress = Progress(config.steps, config.telemetry) if is_first_rank() else None
        self._stepped = time.monotonic()

    def step(self, policy_version: int, batch: PackedRows, metrics: dict[str, float]) -> None:
        """Record and show a step."""
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        if self._metrics is None or self._progress is None:
            return
        step = {
            **metrics,
            "trained_tokens": float(batch.batch_trained_tokens),
            "documents": float(batch.batch_sequences),
            "step/seconds": seconds,
            "step/tokens_per_second": batch.rows["tokens"].numel() / seconds,
        }
        self._metrics.step(policy_version, step)
        self._progress.step(policy_version, step)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._metrics is not None and self._progress is not None:
            self._metrics.close()
            self._progress.close()

"""The actor of the critic: adds `values` to the rows of a batch, and learns from the `returns` computed from them.

A mesh of `pp * fsdp * tp * cp` actors is one critic; the controller calls each endpoint on all ranks at once. It may
have fewer or more ranks than the trainer (`row_shares.py`).
"""

import dataclasses
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from goaly.base.actors import concurrent_endpoint
from goaly.base.telemetry import spans
from goaly.models.settings import ModelSettings
from goaly.train import row_shares
from goaly.train.model_actor import ModelActor
from goaly.train.rank_thread import RankThread
from goaly.train.settings import CriticSettings, TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from goaly.backlog.batch import BatchHandle
    from goaly.backlog.trajectory_queue import TrajectoryQueue
    from goaly.train.model_engine import ModelEngine
    from goaly.trajectory import PackedRows


class CriticModel(ModelActor):
    """One rank of the critic. The constructor is cheap; `start` builds the engine."""

    def __init__(
        self, settings: CriticSettings, trainer: TrainerSettings, model: ModelSettings, queue: "TrajectoryQueue"
    ):
        """`trainer` gives precision, microbatches and activation checkpointing."""
        self._settings = settings
        self._trainer = trainer
        self._model = model
        self._queue = queue
        self._thread: RankThread[ModelEngine] = RankThread("critic")

    @concurrent_endpoint
    async def start(self, checkpoint: str | Path | None = None) -> None:
        """Build the model: the trunk from its folder, the head with weights of 0; or continue from this checkpoint."""
        saved = None if checkpoint is None else Path(checkpoint) / "critic"
        await self._thread.build(self._settings.engine_settings(self._trainer), self._make_engine, saved)

    @concurrent_endpoint
    async def annotate(self, batch: "BatchHandle") -> None:
        """Add `values` to the batch's rows, for all of the trainer's data-parallel ranks."""
        engine = self._thread.engine

        def values(packed: "PackedRows") -> "Awaitable[Tensor]":
            return self._thread.run(lambda: engine.column(packed.rows), "values", batch=batch.id)

        await row_shares.annotate(self._queue, batch.id, "values", engine, values, count=self._trainer.fsdp)

    @concurrent_endpoint
    async def step(self, batch: "BatchHandle") -> dict[str, float]:
        """Take the optimizer steps of this batch; every rank returns the metrics of the whole batch."""
        from goaly.train.value_head import train_values

        engine = self._thread.engine
        packed = await row_shares.rows(self._queue, batch.id, engine, count=self._trainer.fsdp)
        started = time.monotonic()
        metrics = await self._thread.run(
            lambda: train_values(engine, packed, self._settings), "train_critic", batch=batch.id
        )
        metrics["train_seconds"] = time.monotonic() - started
        return {f"critic/{name}": value for name, value in metrics.items()}

    @concurrent_endpoint
    async def close(self) -> None:
        """Stop the engine's thread."""
        self._thread.close()
        spans.flush()

    def _make_engine(self) -> "ModelEngine":
        from goaly.train.model_engine import ModelEngine
        from goaly.train.value_head import VALUES

        model = dataclasses.replace(self._model, path=self._settings.path or self._model.path)
        return ModelEngine(model, self._settings.engine_settings(self._trainer), VALUES)

"""The actor that holds frozen weights and adds their log-probs to a batch's rows.

Its ranks may be fewer or more than the trainer's (`shares.py`).
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from goaly.models.settings import ModelSettings
from goaly.telemetry import spans
from goaly.train import shares
from goaly.train.rank import RankThread
from goaly.train.settings import ReferenceSettings, TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from goaly.backlog.batch import BatchHandle
    from goaly.train.engine import TrainEngine
    from goaly.trajectory import PackedRows


class ReferenceModel(Actor):
    """One rank of the reference model. The constructor is cheap; `start` builds the engine."""

    def __init__(self, settings: ReferenceSettings, trainer: TrainerSettings, model: ModelSettings):
        """Log-probs are computed as the trainer computes them, in microbatches of its size."""
        self._shares = trainer.fsdp
        self._settings = dataclasses.replace(
            trainer,
            fsdp=settings.fsdp,
            tp=settings.tp,
            threads=settings.threads,
            activation_checkpointing="off",
            compile=False,
        )
        self._model = model if settings.path is None else dataclasses.replace(model, path=settings.path)
        self._thread: RankThread[TrainEngine] = RankThread("reference")

    @concurrent_endpoint
    async def start(self) -> None:
        """Build and load the frozen model."""
        await self._thread.build(self._settings, self._make_engine)

    @concurrent_endpoint
    async def annotate(self, queue: Any, batch: "BatchHandle") -> None:
        """Add `reference_logprobs` to the batch's rows, for all of the trainer's data-parallel ranks."""

        async def logprobs(packed: "PackedRows") -> "Tensor":
            return await self._thread.run(lambda: self._logprobs(packed, batch.id))

        await shares.annotate(queue, batch.id, "reference_logprobs", self._thread.engine, logprobs, count=self._shares)

    @concurrent_endpoint
    async def close(self) -> None:
        """Let go of the thread."""
        self._thread.close()
        spans.flush()

    def _make_engine(self) -> "TrainEngine":
        from goaly.train.engine import TrainEngine

        return TrainEngine(self._model, self._settings, trains=False)

    def _logprobs(self, packed: "PackedRows", batch_id: int) -> "Tensor":
        with spans.span("reference", batch=batch_id):
            return self._thread.engine.logprobs(packed.rows)

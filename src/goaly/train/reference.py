"""The actor that holds frozen weights and adds their log-probs to a batch's rows.

Its ranks may be fewer or more than the trainer's: the trainer's shares of a batch are dealt to them in rounds, and a
rank without a share in a round computes the first one along, because all ranks take part in every all-gather.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from goaly.models.settings import ModelSettings
from goaly.telemetry import spans
from goaly.train.rank import RankThread
from goaly.train.settings import ReferenceSettings, TrainerSettings

if TYPE_CHECKING:
    from goaly.backlog.batch import BatchHandle
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
        self._thread = RankThread("reference")

    @concurrent_endpoint
    async def start(self) -> None:
        """Build and load the frozen model."""
        await self._thread.build(self._model, self._settings, trains=False)

    @concurrent_endpoint
    async def annotate(self, queue: Any, batch: "BatchHandle") -> None:
        """Add `reference_logprobs` to the batch's rows, for all of the trainer's data-parallel ranks."""
        engine = self._thread.engine
        for first in range(0, self._shares, self._settings.fsdp):
            share = first + engine.dp_rank
            mine = share < self._shares
            packed: PackedRows = await queue.rows.call_one(batch.id, share if mine else 0)
            column_RL = await self._thread.run(lambda rows=packed.rows: self._logprobs(rows, batch.id))
            if mine and engine.leads:
                await queue.annotate.call_one(batch.id, share, "reference_logprobs", column_RL)

    @concurrent_endpoint
    async def close(self) -> None:
        """Let go of the thread."""
        self._thread.close()
        spans.flush()

    def _logprobs(self, rows: Any, batch_id: int) -> Any:
        with spans.span("reference", batch=batch_id):
            return self._thread.engine.logprobs(rows)

"""The actor of the reference model: adds `reference_logprobs` to the rows of a batch, and as a teacher what it thinks
of their tokens.

Its weights are frozen, or replaced by the policy's every `refresh_every` steps, or by a moving average of these. It may
have fewer or more ranks than the trainer (`row_shares.py`).

Weights that are not those that were published end the reference (`weights/digest.py`).

Invariant
    train-6: One version of the reference computes all log-probs of a batch: with `refresh_every=n`, policy version k -
        k % n those of batch k.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from goaly.base.actors import concurrent_endpoint
from goaly.base.errors import WeightsError
from goaly.base.telemetry import spans
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.train import row_shares
from goaly.train.model_actor import ModelActor
from goaly.train.rank_thread import RankThread
from goaly.train.settings import ReferenceSettings, TrainerSettings
from goaly.weights.settings import WeightSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from goaly.backlog.batch import BatchHandle
    from goaly.backlog.trajectory_queue import TrajectoryQueue
    from goaly.train.average import Average
    from goaly.train.train_engine import TrainEngine
    from goaly.trajectory import PackedRows
    from goaly.weights.store import WeightStore
    from goaly.weights.subscriber import Subscriber


class ReferenceModel(ModelActor):
    """One rank of the reference model. The constructor is cheap; `start` builds the engine."""

    def __init__(
        self,
        settings: ReferenceSettings,
        trainer: TrainerSettings,
        model: ModelSettings,
        queue: "TrajectoryQueue",
        weights: WeightSettings | None = None,
        store: "WeightStore | None" = None,
        loss: LossSettings | None = None,
        *,
        compares: bool = True,
    ):
        """`trainer` gives precision, temperature and microbatches. With `refresh_every` the weights come from the
        `store`. It teaches if the `loss` distils, and adds its log-probs of the batch's own rows if it `compares`."""
        assert settings.refresh_every is None or store is not None, "refresh_every needs a store"
        self._shares = trainer.fsdp
        self._settings = settings.engine_settings(trainer)
        self._offload = settings.offload
        self._model = model if settings.path is None else dataclasses.replace(model, path=settings.path)
        self._thread: RankThread[TrainEngine] = RankThread("reference")
        self._distill = None if loss is None else loss.distill
        self._compares = compares
        self._refresh_every = settings.refresh_every
        self._weight_settings = dataclasses.replace(weights or WeightSettings(), spare="device")
        self._store = store
        self._queue = queue
        self._subscriber: Subscriber | None = None
        self._keeps = settings.average
        self._average: Average | None = None
        self._group: ProcessGroup | None = None
        """The ranks of the reference, if there are several."""
        self._one_batch_at_a_time = asyncio.Lock()

    @concurrent_endpoint
    async def start(self, weights: str | Path | None = None) -> int:
        """Build and load the model, with the weights in this folder if it was refreshed; their policy version."""
        await self._thread.build(self._settings, self._make_engine, None if weights is None else Path(weights))
        if self._refresh_every is not None:
            from goaly.weights.subscriber import Subscriber

            assert self._store is not None
            self._subscriber = Subscriber(
                self._store,
                self._thread.engine.named_tensors(),
                f"reference.{self._thread.rank}",
                self._weight_settings,
            )
            if (keeps := self._keeps) is not None:
                from goaly.train.average import Average

                tensors = self._thread.engine.named_tensors()
                self._average = await self._thread.run(lambda: Average(tensors, keeps), "average")
            await self._subscriber.join()
            self._group = await self._thread.run(_group_of_ranks, "join the other ranks")
        return self._thread.engine.policy_version

    @concurrent_endpoint
    async def refresh(self, batch: "BatchHandle") -> int:
        """Load the weights that this batch's log-probs are computed with, if they are due; their policy version."""
        async with self._one_batch_at_a_time:
            return await self._refreshed_for(batch.id)

    @concurrent_endpoint
    async def annotate(self, batch: "BatchHandle") -> None:
        """Add `reference_logprobs` and a teacher's columns to the batch's rows, for all of the trainer's data-parallel
        ranks."""
        engine, key, distill = self._thread.engine, "reference_logprobs", self._distill
        top_k = distill.top_k if distill is not None and distill.uses_top else 0

        def logprobs(packed: "PackedRows") -> "Awaitable[Tensor]":
            return self._thread.run(lambda: engine.logprobs(packed.rows), "reference", batch=batch.id)

        def judgement(packed: "PackedRows") -> "Awaitable[dict[str, Tensor]]":
            return self._thread.run(lambda: engine.judgement(packed.rows, top_k), "teach", batch=batch.id)

        async with self._one_batch_at_a_time:  # train-6
            await self._refreshed_for(batch.id)
            if self._compares:
                await row_shares.annotate(self._queue, batch.id, key, engine, logprobs, count=self._shares)
            if distill is not None:
                await row_shares.judge(self._queue, batch.id, engine, judgement, count=self._shares)

    @concurrent_endpoint
    async def close(self) -> None:
        """Leave the store and stop the engine's thread."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            await subscriber.close()
        self._thread.close()
        spans.flush()

    async def _refreshed_for(self, batch_id: int) -> int:
        """Load the reference weights of this batch (train-6), and return their version."""
        subscriber, engine = self._subscriber, self._thread.engine
        if subscriber is None or self._refresh_every is None:
            return engine.policy_version
        due = batch_id - batch_id % self._refresh_every  # train-6
        if due != engine.policy_version:
            for _ in range(2):  # once more if the trainer died meanwhile
                await subscriber.newest(due - 1)  # the publish of the trainer, or of the one that replaces it
                if await subscriber.prefetch(due):
                    break
            else:
                raise WeightsError(
                    f"reference: batch {batch_id} needs policy version {due}, which is no longer in the weight store; "
                    f"the reference is still at version {engine.policy_version}"
                )

            from goaly.weights.digest import gathered

            def apply() -> int:
                if self._group is not None:
                    subscriber.verify_together(partial(gathered, group=self._group))
                version = subscriber.apply()
                engine.check_base()
                return version

            version = await self._thread.run(apply, "refresh")
            await subscriber.verify_applied()
            if self._average is not None:
                await self._thread.run(self._average.take, "average")
            engine.steps_done = version
            await subscriber.release()
        return due

    def _make_engine(self) -> "TrainEngine":
        from goaly.train.train_engine import TrainEngine

        return TrainEngine(self._model, self._settings, trains=False, offload=self._offload)


def _group_of_ranks() -> "ProcessGroup | None":
    import torch.distributed as dist

    from goaly.weights.digest import several_ranks

    return dist.new_group(backend="gloo") if several_ranks() else None

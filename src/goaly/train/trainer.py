"""The actor that trains the policy: pulls its rows of a batch, takes the optimizer steps, publishes its shards.

A mesh of `pp * fsdp * tp * cp` actors is one trainer; the controller calls each endpoint on all ranks at once. The
torch environment (RANK and friends) must be set before `start`.

Invariant
    train-4: Weights are published only between two batches; their version is the number of batches trained. A version
        is published once, however often it is asked for.
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from goaly.base.actors import concurrent_endpoint
from goaly.base.telemetry import spans
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings, MoeSettings
from goaly.train.model_actor import ModelActor
from goaly.train.rank_thread import RankThread
from goaly.train.settings import TrainerSettings
from goaly.weights.settings import WeightSettings

if TYPE_CHECKING:
    from goaly.backlog.batch import BatchHandle
    from goaly.backlog.trajectory_queue import TrajectoryQueue
    from goaly.losses.objective import Objective
    from goaly.train.train_engine import TrainEngine
    from goaly.weights.publisher import Publisher
    from goaly.weights.store import WeightStore


class PolicyTrainer(ModelActor):
    """One rank of the trainer. The constructor is cheap; `start` builds the engine and the objective."""

    _objective: "Objective"

    def __init__(
        self,
        settings: TrainerSettings,
        model: ModelSettings,
        loss: LossSettings,
        weights: WeightSettings,
        store: "WeightStore",
        queue: "TrajectoryQueue",
        moe: MoeSettings | None = None,
        *,
        earlier_policies: int = 0,
    ):
        """Batches come from the `queue`, and versions of the policy go to the `store`. With bitwise numerics samples of
        the last `earlier_policies` versions are compared, too."""
        self._settings = settings
        self._model = model
        self._loss_settings = loss
        self._weight_settings = weights.of_model(model.dtype)
        self._store = store
        self._queue = queue
        self._moe = moe or MoeSettings()
        self._earlier_policies = earlier_policies
        self._thread: RankThread[TrainEngine] = RankThread("train")
        self._publisher: Publisher | None = None
        self._published: int | None = None
        self._parameters_at_rest = asyncio.Lock()

    @concurrent_endpoint
    async def start(self, checkpoint: str | Path | None = None) -> int:
        """Build and load the model, or continue from this checkpoint; its policy version."""
        saved = None if checkpoint is None else Path(checkpoint) / "trainer"
        await self._thread.build(self._settings, self._make_engine, saved)
        from goaly.losses.objective import PolicyObjective
        from goaly.weights.publisher import Publisher

        self._objective = PolicyObjective(self._loss_settings)
        self._publisher = Publisher(
            self._store,
            self._thread.engine.named_tensors(),
            self._weight_settings,
            rank=self._thread.rank,
            world=self._settings.ranks,
        )
        return self._thread.engine.policy_version

    @concurrent_endpoint
    async def step(self, batch: "BatchHandle") -> dict[str, float]:
        """Take the optimizer steps of this batch; every rank returns the metrics of the whole batch."""
        engine = self._thread.engine
        asked = time.monotonic()
        rows = await self._queue.rows.call_one(batch.id, engine.dp_rank)
        started = time.monotonic()
        async with self._parameters_at_rest:  # train-4
            version = engine.policy_version
            routing = {}
            if self._moe.compares(version):
                effect = partial(engine.effect_of_replay, rows.rows)
                routing = await self._thread.run(effect, "compare_routing", version=version, batch=batch.id)
            train = partial(engine.train_step, rows, self._objective)
            metrics = await self._thread.run(train, "train", version=version, batch=batch.id)
        seconds = time.monotonic() - started
        return (
            metrics
            | routing
            | {
                "rows_seconds": started - asked,
                "train_seconds": seconds,
                "train_tokens_per_second": batch.tokens / seconds,
            }
        )

    @concurrent_endpoint
    async def publish(self) -> int:
        """Stage this rank's shards of the current version, and return the version once they are copied."""
        engine = self._thread.engine
        assert self._publisher is not None, "start makes engine and publisher"
        async with self._parameters_at_rest:  # train-4
            version = engine.policy_version
            if version != self._published:
                with spans.span("publish", version=version):
                    await self._publisher.publish(version)
                self._published = version
        return version

    @concurrent_endpoint
    async def digest(self) -> str:
        """The digest of the current parameters, equal for equal bits on any mesh."""
        engine = self._thread.engine
        async with self._parameters_at_rest:  # it is a collective, as saving is
            return await self._thread.run(engine.digest, "digest", version=engine.policy_version)

    @concurrent_endpoint
    async def save(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder."""
        engine = self._thread.engine
        async with self._parameters_at_rest:
            await self._thread.run(lambda: engine.save_hf(folder), "save")

    @concurrent_endpoint
    async def go_back(self, checkpoint: str | Path) -> int:
        """Take the parameters and the optimizer's state in this folder, of an earlier version; the present version.

        The version stays, and is not published again: the next step makes the first version after the return."""
        async with self._parameters_at_rest:
            await self._thread.go_back(Path(checkpoint))
            self._published = self._thread.engine.policy_version
            return self._published

    @concurrent_endpoint
    async def close(self) -> None:
        """Free the publisher's memory and stop the engine's thread."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close()
        self._thread.close()
        spans.flush()

    def _make_engine(self) -> "TrainEngine":
        from goaly.train.train_engine import TrainEngine

        return TrainEngine(self._model, self._settings, earlier_policies=self._earlier_policies)

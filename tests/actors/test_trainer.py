"""Trainer and reference in real processes: two FSDP ranks, one reference rank for both, a real weight store.

Each process takes seconds to import torchtitan, so tests that need further actors spawn them in these processes.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from monarch.actor import Actor, ActorError, concurrent_endpoint
from monarch.spmd import setup_torch_elastic_env
from spawned import spawn
from torch.distributed.tensor import DTensor

from goaly.backlog.batch import BatchHandle
from goaly.journal.checkpoint_folder import Checkpoints
from goaly.losses.objective import PolicyObjective
from goaly.losses.settings import LossSettings
from goaly.models.settings import ModelSettings
from goaly.train.reference import ReferenceModel
from goaly.train.settings import OptimizerSettings, ReferenceSettings, TrainerSettings
from goaly.train.train_engine import TrainEngine
from goaly.train.trainer import PolicyTrainer
from goaly.trajectory import PackedRows
from goaly.weights.settings import WeightSettings
from goaly.weights.store import WeightStore
from goaly.weights.subscriber import Subscriber
from tests.unit.train import batches

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(300)  # the first test waits for three processes to import torchtitan

SETTINGS = TrainerSettings(fsdp=2, optimizer=OptimizerSettings(lr=1e-2), microbatch_rows=1)
LOSS = LossSettings(kl_coef=0.05)


class Shares(Actor):
    """Stands in for the trajectory queue: two shares of one batch, without reference log-probs."""

    def __init__(self, shares: list[PackedRows]):
        self._shares = shares

    @concurrent_endpoint
    async def rows(self, batch_id: int, dp_rank: int) -> PackedRows:
        """A rank's share."""
        return self._shares[dp_rank]

    @concurrent_endpoint
    async def annotate(self, batch_id: int, dp_rank: int, key: str, column: torch.Tensor) -> None:
        """Keep a column."""
        self._shares[dp_rank].rows[key] = column

    @concurrent_endpoint
    async def fill_advantages(self, value: float) -> None:
        """Replace all advantages."""
        for share in self._shares:
            share.rows["advantages"].fill_(value)


@dataclass(frozen=True)
class Actors:
    """What a test talks to."""

    pair: Any
    """The two processes of the trainer."""
    alone: Any
    """The process of all other actors."""
    trainer: Any
    reference: Any
    queue: Any
    store: Any
    handle: BatchHandle


def batch() -> PackedRows:
    packed = batches.pack(batches.documents(10), rows=4, row_length=160)
    del packed.rows["reference_logprobs"]
    return packed


@pytest.fixture(scope="module")
def actors(tiny_model_folder: Path) -> Iterator[Actors]:
    model = ModelSettings(path=str(tiny_model_folder))
    trainers = spawn("trainer", 2)
    alone = spawn("trainer", name="alone")
    setup_torch_elastic_env(trainers)
    store = alone.spawn("store", WeightStore, WeightSettings(verify_every=1))
    packed = batch()
    shares = [
        PackedRows(
            rows=packed.rows[rank::2],
            batch_trained_tokens=packed.batch_trained_tokens,
            batch_sequences=packed.batch_sequences,
        )
        for rank in range(2)
    ]
    queue = alone.spawn("queue", Shares, shares)
    trainer = trainers.spawn("trainer", PolicyTrainer, SETTINGS, model, LOSS, WeightSettings(), store, queue)
    reference = alone.spawn("reference", ReferenceModel, ReferenceSettings(), SETTINGS, model, queue)
    trainer_starts, reference_starts = trainer.start.call(), reference.start.call()
    assert list(trainer_starts.get().values()) == [0, 0]
    reference_starts.get()
    handle = BatchHandle(id=0, sequences=10, trained_tokens=packed.batch_trained_tokens, tokens=640, metrics={})
    yield Actors(
        pair=trainers, alone=alone, trainer=trainer, reference=reference, queue=queue, store=store, handle=handle
    )
    trainer.close.call().get()
    reference.close.call().get()
    alone.stop().get()
    trainers.stop().get()


async def first(answers: Any) -> Any:
    return next(iter((await answers).values()))


async def test_a_step_and_a_publish_over_two_ranks_are_those_of_one_engine(  # train-4
    actors: Actors, tiny_model_folder: Path, tmp_path: Path
):
    await actors.reference.annotate.call(actors.handle)
    metrics = await first(actors.trainer.step.call(actors.handle))
    alone = TrainEngine(ModelSettings(path=str(tiny_model_folder)), TrainerSettings(optimizer=SETTINGS.optimizer))
    packed = batch()
    packed.rows["reference_logprobs"] = alone.logprobs(packed.rows)
    expected = alone.train_step(packed, PolicyObjective(LOSS))
    assert expected["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)

    assert await first(actors.trainer.publish.call()) == 1
    pulled = {name: torch.zeros_like(tensor) for name, tensor in alone.named_tensors().items()}
    subscriber = Subscriber(actors.store, pulled, reader="test")
    assert await subscriber.newest(0) == 1
    assert await subscriber.prefetch(1)
    assert subscriber.apply() == 1
    await subscriber.close()

    await actors.trainer.save.call(str(tmp_path / "policy"))
    saved = TrainEngine(ModelSettings(path=str(tmp_path / "policy")), TrainerSettings(), trains=False).named_tensors()
    assert not any(isinstance(tensor, DTensor) for tensor in saved.values())
    for name, tensor in alone.named_tensors().items():
        assert torch.equal(pulled[name], saved[name])
        torch.testing.assert_close(pulled[name], tensor, atol=2e-3, rtol=1e-3)


async def test_a_step_that_is_not_finite_names_the_metric_and_leaves_a_trainer_that_can_step(actors: Actors):
    await actors.reference.annotate.call(actors.handle)
    await actors.queue.fill_advantages.call(float("nan"))
    with pytest.raises(Exception, match="train loss is nan at policy version"):
        await actors.trainer.step.call(actors.handle)
    await actors.queue.fill_advantages.call(1.0)
    async with asyncio.timeout(60):
        metrics = await first(actors.trainer.step.call(actors.handle))
    assert metrics["grad_norm"] > 0


async def test_a_refreshed_reference_is_the_policy_of_the_last_multiple_for_all_of_a_batch(
    actors: Actors, tiny_model_folder: Path
):
    async def stepped() -> tuple[int, dict[str, float]]:
        """One step and its version, published."""
        metrics = await first(actors.trainer.step.call(actors.handle))
        return await first(actors.trainer.publish.call()), metrics

    class Damaged(ReferenceModel):
        @concurrent_endpoint
        async def verified(self) -> int:
            """How many versions were verified on this rank; from now on it damages what it fetches."""
            copier = self._subscriber._copier
            copy = copier.copy

            def damaged(pairs: Any) -> None:
                copy(pairs)
                target = pairs[0][0]
                target.view(torch.int32)[(0,) * target.dim()] ^= 1

            copier.copy = damaged
            return self._subscriber.verified_updates

    model, settings = ModelSettings(path=str(tiny_model_folder)), ReferenceSettings(fsdp=2, refresh_every=2)
    reference = actors.pair.spawn(
        "following", Damaged, settings, SETTINGS, model, actors.queue, WeightSettings(), actors.store
    )
    readers = (await actors.store.state.call_one()).readers
    await reference.start.call()
    assert (await actors.store.state.call_one()).readers == readers + 2  # both ranks have said what they need
    version, _ = await stepped()
    if version % 2:
        version, _ = await stepped()

    async def annotated(batch_id: int) -> list[int]:
        await reference.annotate.call(replace(actors.handle, id=batch_id))
        return list((await reference.refresh.call(replace(actors.handle, id=batch_id))).values())

    assert await annotated(version) == [version, version]  # train-6: both ranks
    _, metrics = await stepped()
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert await annotated(version + 1) == [version, version]  # there is a newer one
    newer, metrics = await stepped()
    assert metrics["kl_reference"] > 1e-6
    assert newer == version + 2
    assert await annotated(newer) == [newer, newer]
    _, metrics = await stepped()
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(
        Exception, match=f"batch 1 needs policy version 0, which is no longer in the .* still at version {newer}"
    ):
        await annotated(1)
    assert set((await reference.verified.call()).values()) == {2}  # both refreshes
    await stepped()
    await stepped()
    with pytest.raises(ActorError, match=r"version \d+ at reader reference\.\d: the weights have the digest"):
        await annotated(newer + 2)
    await reference.close.call()


async def test_trainer_and_reference_continue_from_a_checkpoint_that_is_written_while_steps_go_on(
    actors: Actors, tiny_model_folder: Path, tmp_path: Path
):
    model, following = ModelSettings(path=str(tiny_model_folder)), ReferenceSettings(refresh_every=2)

    def reference(name: str) -> Any:
        arguments = following, SETTINGS, model, actors.queue, WeightSettings(), actors.store
        return actors.alone.spawn(name, ReferenceModel, *arguments)

    async def version_of(reference: Any, batch_id: int) -> int:
        return await first(reference.refresh.call(replace(actors.handle, id=batch_id)))

    async def published() -> int:
        await actors.trainer.step.call(actors.handle)
        return await first(actors.trainer.publish.call())

    before = reference("before")
    await before.start.call()
    version = await published()
    if version % 2:
        version = await published()
    assert await version_of(before, version) == version
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(version)
    assert list((await actors.trainer.stage.call()).values()) == [version, version]
    assert list((await before.stage.call()).values()) == [version]
    digests = list((await actors.trainer.digest.call()).values())
    writing = actors.trainer.write.call(str(folder / "trainer"))
    newer = await published()
    await writing
    await before.write.call(str(folder / "reference"))
    checkpoint = checkpoints.commit(version, {})
    assert list((await actors.trainer.digest.call()).values()) != digests
    for _ in range(4):
        newer = await published()

    settings = replace(SETTINGS, fsdp=1)
    resumed = actors.alone.spawn(
        "resumed", PolicyTrainer, settings, model, LOSS, WeightSettings(), actors.store, actors.queue
    )
    assert await first(resumed.start.call(str(checkpoint.folder))) == version
    assert [await first(resumed.digest.call())] * 2 == digests
    after = reference("after")
    assert await first(after.start.call(checkpoint.folder / "reference")) == version
    assert await version_of(after, version + 1) == version  # train-6: the store does not have it any more
    with pytest.raises(Exception, match=f"still at version {version}"):
        await version_of(after, version + 2)
    assert newer > version + 3
    for actor in (before, after, resumed):
        await actor.close.call()

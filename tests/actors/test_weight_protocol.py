"""The store's protocol through a real store actor: waits, cancellations, failed and killed processes."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from monarch.actor import ActorError, this_proc
from spawned import spawn

from goaly.base.errors import WeightsError, WritersGone
from goaly.base.process import process_mark
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.layout import Layout
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store import StoreState, WeightStore
from goaly.weights.subscriber import Subscriber

numbers = itertools.count()


def new_store(settings: WeightSettings) -> Any:
    return this_proc().spawn(f"weight_store_{next(numbers)}", WeightStore, settings)


class Trainer:
    """One writer rank of `world`, in this process; its two tensors are filled with the version's number."""

    def __init__(self, store: Any, settings: WeightSettings, rank: int = 0, world: int = 1):
        self.tensors = {"a": torch.zeros(64, 8), "b": torch.zeros(5)}
        self.publisher = Publisher(store, self.tensors, settings, rank=rank, world=world)

    async def publish(self, version: int) -> bool:
        for tensor in self.tensors.values():
            tensor.fill_(version)
        return await self.publisher.publish(version)


class Reader:
    """A reader in this process."""

    def __init__(self, store: Any, name: str):
        self.tensors = {"a": torch.full((64, 8), -1.0), "b": torch.full((5,), -1.0)}
        self.subscriber = Subscriber(store, self.tensors, name)

    async def pull(self, version: int) -> bool:
        if not await self.subscriber.prefetch(version):
            return False
        assert self.subscriber.apply() == version
        for tensor in self.tensors.values():
            assert bool((tensor == version).all())
        return True


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen]:
    """A process that lives until it is killed."""
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield other
    other.kill()
    other.wait()
    other.stdin.close()


async def within(awaitable: Any, seconds: float = 20) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


async def test_a_reader_is_woken_by_the_commit_and_gets_that_version() -> None:
    settings = WeightSettings()
    store = new_store(settings)
    trainer, reader = Trainer(store, settings), Reader(store, "waiting")
    waiting = asyncio.create_task(reader.subscriber.newest())
    assert await within(trainer.publish(0))
    assert await within(waiting) == 0
    assert await within(reader.pull(0))
    late = Reader(store, "late")
    await within(trainer.publish(1))
    assert await within(late.subscriber.newest()) == 1
    assert await within(late.pull(1))


async def test_a_killed_readers_lease_is_free_at_once(other_process: subprocess.Popen) -> None:  # weights-3
    settings = WeightSettings(slots=2)
    store = new_store(settings)
    trainer, reader = Trainer(store, settings), Reader(store, "alive")
    doomed = (await store.join_reader.call_one("doomed", process_mark(other_process.pid))).number
    await within(trainer.publish(0))
    assert (await within(store.lease_newer.call_one(doomed, 1, -1))).version == 0
    await within(trainer.publish(1))
    assert await within(reader.subscriber.newest(0)) == 1  # it waits for nobody, though both slots are leased now
    state: StoreState = await store.state.call_one()
    assert state.leased == {"doomed": 0, "alive": 1}
    other_process.kill()

    async def news() -> StoreState:
        while (state := await store.state.call_one()).readers > 1:
            pass
        return state

    assert (await within(news())).leased == {"alive": 1}


async def test_a_cancelled_wait_holds_nothing() -> None:
    settings = WeightSettings()
    store = new_store(settings)
    trainer, reader = Trainer(store, settings), Reader(store, "reader")
    await within(trainer.publish(0))
    await within(reader.pull(0))
    waiting = asyncio.create_task(reader.subscriber.newest(0))
    await store.state.call_one()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await within(trainer.publish(1))
    state: StoreState = await store.state.call_one()
    assert state.leased == {}
    assert await within(reader.subscriber.newest(0)) == 1


async def test_a_killed_trainer_rank_leaves_no_half_version_and_the_others_are_told(
    other_process: subprocess.Popen,
) -> None:  # weights-3
    settings = WeightSettings()
    store = new_store(settings)
    trainer = Trainer(store, settings, 0, 2)
    layout: Layout = layout_of(trainer.tensors)
    joining = asyncio.create_task(trainer.publish(0))
    await within(store.join_writer.call_one(1, 2, layout, process_mark(other_process.pid)))
    assert await within(joining) is False
    waiting = asyncio.create_task(trainer.publish(1))
    await store.state.call_one()
    other_process.kill()
    with pytest.raises(ActorError, match=r"writer rank 1 \(process \d+\) ended"):
        await within(waiting)
    state: StoreState = await store.state.call_one()
    assert (state.newest, state.versions) == (None, ())


async def test_a_version_that_was_written_over_under_a_reader_is_an_error_not_a_torn_pull() -> None:  # weights-1
    settings = WeightSettings()
    store = new_store(settings)
    trainer, reader = Trainer(store, settings), Reader(store, "reader")
    await within(trainer.publish(0))
    version = await within(reader.subscriber.newest())
    trainer.publisher._slots.seal(0, 1)  # as a writer would that ignores leases
    with pytest.raises(WeightsError, match="version 0 from writer rank 0 was written over while reader reader held it"):
        await within(reader.subscriber.prefetch(version))
    with pytest.raises(WeightsError, match="nothing to apply"):
        reader.subscriber.apply()


async def test_a_rank_of_another_group_size_is_refused() -> None:
    settings = WeightSettings()
    store = new_store(settings)
    await within(Trainer(store, settings).publish(0))
    with pytest.raises(ActorError, match="writer rank 1 of 2 joins a group of 1"):
        await within(Trainer(store, settings, 1, 2).publish(0))


async def test_readers_in_another_process_than_the_store_are_told_why_no_version_will_come() -> None:
    settings = WeightSettings()
    mesh = spawn("hub")
    store: Any = mesh.spawn("weight_store", WeightStore, settings)
    trainer, early, late = Trainer(store, settings), Reader(store, "early"), Reader(store, "late")
    assert await within(trainer.publish(0), 60)  # the store's process imports torch first
    waiting = asyncio.create_task(early.subscriber.newest(0))
    while (await store.state.call_one()).readers == 0:
        pass
    await within(trainer.publisher.close())
    for newest in (waiting, late.subscriber.newest(0)):
        with pytest.raises(WritersGone, match=r"^no version above 0 will come: writer rank 0 has left$"):
            await within(newest)
    await mesh.stop()

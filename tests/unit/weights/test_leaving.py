"""Members that leave, die or fail: the others get an error instead of waiting, and no memory or lease is left."""

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from local_store import Life, LocalStore, as_process, within

from goaly.base.errors import WeightsError, WritersGone
from goaly.weights import rdma
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.store_client import BackgroundTasks, SharedTask
from goaly.weights.subscriber import Subscriber

SETTINGS = WeightSettings()
ELSEWHERE = "another host"


@pytest.fixture
def store() -> LocalStore:
    return LocalStore(SETTINGS)


@pytest.fixture
def life() -> Iterator[Life]:
    life = Life()
    yield life
    life.kill()


def writers(store: LocalStore, world: int) -> list[Publisher]:
    return [Publisher(store, {"a": torch.zeros(4)}, SETTINGS, rank=rank, world=world) for rank in range(world)]


def reader(store: LocalStore, host: str | None = None) -> Subscriber:
    return Subscriber(store, {"a": torch.zeros(4)}, "reader", SETTINGS, host=host)


def open_segments() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += "goaly-weights" in os.readlink(f"/proc/self/fd/{descriptor}")
    return count


async def test_once_a_rank_has_left_the_others_are_told_that_no_version_can_be_whole(store: LocalStore) -> None:
    first, second = writers(store, 2)
    await within(asyncio.gather(first.publish(0), second.publish(0)))
    await second.close()
    for version in (1, 2):
        with pytest.raises(WeightsError, match=f"version {version} can't be staged any more: writer rank 1 has left"):
            await within(first.publish(version))
    await first.close()


async def test_readers_that_wait_are_told_when_a_writer_has_died(store: LocalStore, life: Life) -> None:
    with as_process(life.mark):
        (writer,) = writers(store, 1)
    await within(writer.publish(0))
    waiting = [asyncio.ensure_future(call) for call in (reader(store).newest(0), reader(store, ELSEWHERE).prefetch(0))]
    await asyncio.sleep(0)
    writer._background.end()  # it registers nothing any more
    life.kill()
    with pytest.raises(WritersGone, match=r"no version above 0 will come: writer rank 0 .* ended"):
        await within(waiting[0])
    with pytest.raises(WeightsError, match=r"can't be read from another host any more: writer rank 0 .* ended"):
        await within(waiting[1])
    await writer.close()


async def test_readers_on_other_hosts_are_told_when_a_writer_can_not_be_reached_from_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(ring: Any) -> None:
        raise RuntimeError("no memory can be registered")

    monkeypatch.setattr(rdma.RemoteSlots, "of", refuse)
    (writer,) = writers(store, 1)
    await within(writer.publish(0))
    with pytest.raises(WeightsError, match=r"writer rank 0 can't be reached .* RuntimeError: no memory"):
        await within(reader(store, ELSEWHERE).prefetch(0))
    assert await within(reader(store).prefetch(0))  # one on this host can
    await writer.close()


async def test_what_was_registered_for_other_hosts_is_given_back_at_the_end(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[rdma.RemoteSlots] = []
    monkeypatch.setattr(rdma.RemoteSlots, "drop", lambda ring: dropped.append(ring))
    monkeypatch.setattr(rdma.RemoteSlots, "of", lambda ring: rdma.RemoteSlots(()))
    (writer,) = writers(store, 1)
    await within(writer.publish(0))
    await within(store.sources.call_one(ELSEWHERE, "auto", store.actor._group))
    await writer.close()
    assert len(dropped) == 1


async def test_a_writer_that_leaves_waits_for_its_registration_and_gives_it_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registering, may_end, dropped = threading.Event(), threading.Event(), list[rdma.RemoteSlots]()

    def register(ring: Any) -> rdma.RemoteSlots:
        registering.set()
        may_end.wait(10)
        return rdma.RemoteSlots(())

    monkeypatch.setattr(rdma.RemoteSlots, "of", register)
    monkeypatch.setattr(rdma.RemoteSlots, "drop", lambda ring: dropped.append(ring))
    (writer,) = writers(store, 1)
    await within(writer.publish(0))
    asking = asyncio.ensure_future(store.sources.call_one(ELSEWHERE, "auto", store.actor._group))
    assert await asyncio.to_thread(registering.wait, 10)
    closing = asyncio.ensure_future(writer.close())
    await asyncio.wait({closing}, timeout=0.1)
    assert not closing.done()
    may_end.set()
    await within(closing)
    assert dropped == [rdma.RemoteSlots(())]
    with pytest.raises(WeightsError, match="can't be read from another host any more: writer rank 0 has left"):
        await within(asking)


async def test_a_first_publish_that_is_cancelled_anywhere_leaves_no_memory_behind(store: LocalStore) -> None:
    gc.collect()
    before = open_segments()
    for turns in range(12):
        (writer,) = writers(LocalStore(SETTINGS), 1)
        publishing = asyncio.ensure_future(writer.publish(0))
        for _ in range(turns):
            await asyncio.sleep(0.001 if turns > 6 else 0)
        publishing.cancel()
        await asyncio.wait({publishing})
        if turns % 2:
            assert await within(writer.publish(1))
        await within(writer.close())
    gc.collect()
    assert open_segments() == before


async def test_a_reader_whose_joining_was_cancelled_is_one_reader(store: LocalStore) -> None:
    (writer,) = writers(store, 1)
    await within(writer.publish(0))
    one = reader(store)
    for turns in range(5):
        joining = asyncio.ensure_future(one.newest())
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        await asyncio.wait({joining})
    assert await within(one.newest()) == 0
    assert (await store.state.call_one()).readers == 1
    await within(one.close())
    assert (await store.state.call_one()).readers == 0
    await writer.close()


async def test_a_prefetch_that_is_cancelled_at_its_very_end_leaves_nothing_to_apply(
    store: LocalStore,
) -> None:  # weights-3
    (writer,) = writers(store, 1)
    await within(writer.publish(0))
    one, releasing = reader(store), asyncio.Event()

    async def release() -> None:
        releasing.set()
        await asyncio.Event().wait()

    one.release = release  # type: ignore[method-assign]
    pulling = asyncio.ensure_future(one.prefetch(0))
    await within(releasing.wait())
    pulling.cancel()
    await asyncio.wait({pulling})
    with pytest.raises(WeightsError, match="nothing to apply"):
        one.apply()
    assert (await store.state.call_one()).leased == {}
    await writer.close()


async def test_what_is_done_once_is_tried_again_only_after_it_failed() -> None:
    outcomes: list[Any] = [RuntimeError("not yet"), 7, 8]

    async def work() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    shared = SharedTask(work)
    with pytest.raises(RuntimeError, match="not yet"):
        await shared()
    assert [await shared(), await shared()] == [7, 7]


async def test_a_pulse_goes_on_after_one_was_lost() -> None:
    pulses = 0
    enough = asyncio.Event()

    async def pulse() -> None:
        nonlocal pulses
        pulses += 1
        if pulses == 1:
            raise ConnectionError("lost")
        enough.set()

    tasks = BackgroundTasks()
    tasks.every(0.001, pulse)
    await within(enough.wait())
    assert pulses >= 2
    tasks.end()

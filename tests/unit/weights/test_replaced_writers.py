"""Writers that die and are replaced: readers wait for the new ones, and never get an older version than they had."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_store import Life, LocalStore, as_process, within

from goaly.base.errors import WeightsError
from goaly.base.process import ProcessMark
from goaly.models.settings import ModelSettings
from goaly.train.reference import ReferenceModel
from goaly.train.settings import ReferenceSettings, TrainerSettings
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber

SETTINGS = WeightSettings()


@pytest.fixture
def store() -> LocalStore:
    return LocalStore(SETTINGS, replaces_writers=True)


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    lives = [Life() for _ in range(2)]
    yield lives
    for life in lives:
        life.kill()


class Writers:
    """A trainer of so many ranks, in processes of its own; rank r has the rows r, r + world, ... of a vector."""

    def __init__(self, store: LocalStore, lives: list[Life], value: float = 0.0):
        self.values = [torch.full((4,), value) for _ in lives]
        self.ranks = []
        for rank, life in enumerate(lives):
            with as_process(life.mark):
                tensors = {f"part{rank}": self.values[rank]}
                self.ranks.append(Publisher(store, tensors, SETTINGS, rank=rank, world=len(lives)))

    async def publish(self, version: int) -> None:
        for values in self.values:
            values.fill_(float(version))
        await within(asyncio.gather(*(rank.publish(version) for rank in self.ranks)))


def reader(store: LocalStore, ranks: int = 1) -> tuple[Subscriber, list[torch.Tensor]]:
    tensors = [torch.full((4,), -1.0) for _ in range(ranks)]
    return Subscriber(store, {f"part{rank}": one for rank, one in enumerate(tensors)}, "reader", SETTINGS), tensors


async def lost(store: LocalStore, count: int) -> None:
    """Until the store has noticed that many deaths of groups."""

    await within(store.actor._until(lambda: store.actor._versions.losses >= count or None))


async def test_a_reader_waits_for_the_writers_that_replace_dead_ones_and_gets_no_version_twice(
    store: LocalStore, lives: list[Life]
) -> None:
    subscriber, (tensor,) = reader(store)
    await Writers(store, lives[:1]).publish(3)
    version = await within(subscriber.newest())
    assert await within(subscriber.prefetch(version))
    assert subscriber.apply() == 3
    waiting = asyncio.ensure_future(subscriber.newest(3))
    lives[0].kill()
    await lost(store, 1)
    newer = Writers(store, lives[1:])
    await newer.publish(3)
    await asyncio.sleep(0.05)
    assert not waiting.done()  # weights-9
    await newer.publish(4)
    assert await within(waiting) == 4
    assert await within(subscriber.prefetch(4))
    assert subscriber.apply() == 4
    assert tensor.tolist() == [4.0] * 4
    late, (other,) = reader(store)
    assert await within(late.newest()) == 4
    assert await within(late.prefetch(4))
    late.apply()
    assert torch.equal(other, tensor)


async def test_a_version_that_dies_with_its_writers_before_a_reader_has_it_comes_from_the_next_ones(
    store: LocalStore, lives: list[Life]
) -> None:
    subscriber, (tensor,) = reader(store)
    await Writers(store, lives[:1]).publish(3)
    assert await within(subscriber.newest()) == 3
    lives[0].kill()
    await lost(store, 1)
    assert await within(subscriber.prefetch(3, subscriber.held)) is False  # weights-9
    await subscriber.release()
    asked = asyncio.ensure_future(subscriber.prefetch(3))
    await asyncio.sleep(0.05)
    assert not asked.done()  # it will come
    newer = Writers(store, lives[1:])
    await newer.publish(3)
    assert await within(asked)
    assert subscriber.apply() == 3
    assert tensor.tolist() == [3.0] * 4


async def test_no_rank_of_a_group_that_lost_one_can_publish_and_its_late_calls_change_nothing(
    store: LocalStore, lives: list[Life]
) -> None:
    group = Writers(store, lives)
    await group.publish(1)
    assert not await within(group.ranks[0].publish(2))
    survivor = asyncio.ensure_future(group.ranks[0].publish(3))
    await asyncio.sleep(0.05)
    lives[1].kill()
    with pytest.raises(WeightsError, match="writer rank 0 was lost, or another rank of its group"):
        await within(survivor)
    next_lives = [Life() for _ in range(2)]
    newer = Writers(store, next_lives)
    await newer.publish(2)
    with pytest.raises(WeightsError, match="was lost"):
        await within(group.ranks[0].publish(4))
    assert store.failures == []  # such a failure would end the store
    subscriber, tensors = reader(store, 2)
    assert await within(subscriber.newest()) == 2
    assert await within(subscriber.prefetch(2))
    subscriber.apply()
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4] * 2
    for life in next_lives:
        life.kill()


async def test_a_writer_may_take_the_place_of_one_whose_death_is_not_known_yet(store: LocalStore) -> None:
    def far(pid: int) -> Any:
        return type("Life", (), {"mark": ProcessMark(host="another host", pid=pid, started=1)})()

    await Writers(store, [far(1)]).publish(1)
    newer = Writers(store, [far(2)])
    await newer.publish(1)
    await newer.publish(2)
    assert (await store.state.call_one()).newest == 2


async def test_a_reader_whose_source_vanishes_while_it_connects_waits_for_the_next_one(
    store: LocalStore, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    from goaly.weights.shared_memory import Segment

    subscriber, (tensor,) = reader(store)
    await Writers(store, lives[:1]).publish(3)
    assert await within(subscriber.newest()) == 3
    opened = Segment.open

    def gone(handle: Any) -> Segment:
        raise WeightsError("its owner must be alive")

    monkeypatch.setattr(Segment, "open", gone)
    with pytest.raises(WeightsError, match="must be alive"):
        await within(subscriber.prefetch(3, subscriber.held))  # the lease holds, so this is no death
    lives[0].kill()
    await lost(store, 1)
    assert await within(subscriber.prefetch(3, subscriber.held)) is False
    monkeypatch.setattr(Segment, "open", opened)
    await Writers(store, lives[1:]).publish(4)
    assert await within(subscriber.newest(2)) == 4
    assert await within(subscriber.prefetch(4))
    subscriber.apply()
    assert tensor.tolist() == [4.0] * 4


async def test_without_replacement_the_death_of_a_writer_is_the_end(lives: list[Life]) -> None:
    store = LocalStore(SETTINGS)
    await Writers(store, lives[:1]).publish(1)
    lives[0].kill()
    with pytest.raises(WeightsError, match=r"joined already|ended"):
        await Writers(store, lives[1:]).publish(1)


async def test_the_lease_of_a_store_that_died_is_worth_nothing_at_the_next_one(lives: list[Life]) -> None:
    stores = [LocalStore(SETTINGS, replaces_writers=True) for _ in range(2)]
    readers = [reader(store) for store in stores]
    for store, life in zip(stores, lives, strict=True):
        await Writers(store, [life]).publish(3)
    await within(readers[0][0].newest())
    lent = readers[0][0].held
    subscriber, (tensor,) = readers[1]
    assert not await within(subscriber.prefetch(3, lent))
    assert await within(subscriber.prefetch(await within(subscriber.newest())))
    assert (subscriber.apply(), tensor[0].item()) == (3, 3.0)


async def test_a_reference_whose_trainer_dies_during_a_refresh_gets_the_version_from_the_next_one(
    store: LocalStore, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber, (tensor,) = reader(store)
    reference = ReferenceModel(
        ReferenceSettings(refresh_every=3), TrainerSettings(), ModelSettings(), None, None, store
    )
    reference._subscriber = subscriber
    reference._thread._engine = SimpleNamespace(policy_version=0, steps_done=0, check_base=lambda: None)
    await Writers(store, lives[:1]).publish(3)
    newest = subscriber.newest

    async def then_the_trainer_dies(after: int) -> int:
        version = await newest(after)
        monkeypatch.undo()
        lives[0].kill()
        await lost(store, 1)
        return version

    monkeypatch.setattr(subscriber, "newest", then_the_trainer_dies)
    refreshing = asyncio.ensure_future(reference._refreshed_for(4))
    await lost(store, 1)
    assert not refreshing.done()
    await Writers(store, lives[1:]).publish(3)
    assert await within(refreshing) == 3
    assert tensor.tolist() == [3.0] * 4
    assert subscriber.held is None

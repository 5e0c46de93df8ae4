"""Tracks: readers that get only versions which someone has pointed to, while others follow the newest (weights-12)."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_store import LocalStore, within

from goaly.base.errors import WeightsError, WritersGone
from goaly.weights.publisher import Publisher
from goaly.weights.settings import WeightSettings
from goaly.weights.subscriber import Subscriber
from goaly.weights.versions import Versions

SETTINGS = WeightSettings(slots=4)
SERVED, CANDIDATE = "served", "candidate"


class Trainer:
    """One rank with one tensor, whose elements are the version."""

    def __init__(self, store: LocalStore):
        self._tensor = torch.zeros(4)
        self._publisher = Publisher(store, {"w": self._tensor}, SETTINGS, rank=0, world=1)

    async def publish(self, version: int) -> None:
        self._tensor.fill_(version)
        await within(self._publisher.publish(version))


class Replica:
    """A reader with parameters of its own."""

    def __init__(self, store: LocalStore, track: str | None):
        self._tensor = torch.full((4,), -1.0)
        self._subscriber = Subscriber(store, {"w": self._tensor}, track or "newest", SETTINGS, track=track)
        self.version = -1

    async def update(self) -> int:
        """Wait for the next version and apply it; what the parameters then are."""
        self.version = await self._subscriber.newest(self.version)
        assert await self._subscriber.prefetch(self.version)
        self._subscriber.apply()
        await self._subscriber.release()
        assert len(set(self._tensor.tolist())) == 1
        return int(self._tensor[0])


@pytest.fixture
def store() -> LocalStore:
    return LocalStore(SETTINGS)


async def test_a_served_version_stays_while_newer_ones_are_published_and_a_candidate_is_tried(store: LocalStore):
    trainer, served, candidate = Trainer(store), Replica(store, SERVED), Replica(store, CANDIDATE)
    newest = Replica(store, None)
    await trainer.publish(1)
    assert await store.point.call_one(SERVED, 1)
    assert [await within(one.update()) for one in (served, newest)] == [1, 1]
    waiting = asyncio.ensure_future(served.update())
    await trainer.publish(2)
    assert await store.point.call_one(CANDIDATE, 2)
    assert await within(candidate.update()) == 2
    for version in range(3, 12):
        await trainer.publish(version)  # weights-12: neither track's slot is written
    assert await within(newest.update()) == 11
    assert await within(Replica(store, SERVED).update()) == 1  # a replica that takes another one's place
    assert not waiting.done()
    assert await store.point.call_one(SERVED, 2)
    assert await within(waiting) == 2
    assert (await store.state.call_one()).tracks == {SERVED: 2, CANDIDATE: 2}


async def test_a_version_that_is_overwritten_already_cannot_be_pointed_to(store: LocalStore):
    trainer = Trainer(store)
    for version in range(1, 8):
        await trainer.publish(version)
    assert not await store.point.call_one(SERVED, 1)
    assert await store.point.call_one(SERVED, 7)


async def test_a_reader_of_a_track_waits_until_it_points_somewhere(store: LocalStore):
    trainer, served = Trainer(store), Replica(store, SERVED)
    waiting = asyncio.ensure_future(served.update())
    await trainer.publish(1)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await store.point.call_one(SERVED, 1)
    assert await within(waiting) == 1


async def test_the_end_of_the_writers_ends_the_wait_of_a_track(store: LocalStore):
    trainer, served = Trainer(store), Replica(store, SERVED)
    await trainer.publish(1)
    assert await store.point.call_one(SERVED, 1)
    assert await within(served.update()) == 1
    waiting = asyncio.ensure_future(served.update())
    await trainer._publisher.close()
    with pytest.raises(WritersGone):
        await within(waiting)


def published(ledger: Versions, version: int) -> None:
    slot = ledger.begin(0, version)
    assert slot is not None
    assert ledger.staged(0, version, slot)


def test_a_track_moves_up_to_committed_versions_and_leaves_two_slots() -> None:
    ledger = Versions(slots=3, writers=1)
    published(ledger, 1)
    published(ledger, 2)
    assert ledger.point(SERVED, 2)
    with pytest.raises(WeightsError, match="track served: version 3 is not committed; the newest is 2"):
        ledger.point(SERVED, 3)
    with pytest.raises(WeightsError, match="track served: version 1 comes after 2: versions must go up"):
        ledger.point(SERVED, 1)
    published(ledger, 3)
    with pytest.raises(WeightsError, match=r"track candidate: needs 4 slots, there are 3: raise weights\.slots"):
        ledger.point(CANDIDATE, 3)
    assert ledger.point(CANDIDATE, 2)


@given(
    moves=st.lists(
        st.one_of(
            *[st.just(("publish", 0, 0))] * 3,
            st.tuples(st.just("point"), st.integers(0, 1), st.integers(0, 5)),
            st.tuples(st.just("lease"), st.integers(0, 5), st.integers(0, 3)),
            st.tuples(st.just("release"), st.integers(0, 5), st.just(0)),
        ),
        max_size=80,
    ),
    slots=st.integers(4, 6),
)
def test_on_any_course_tracked_versions_stay_and_the_writer_never_waits(
    moves: list[tuple[str, int, int]], slots: int
) -> None:
    ledger, tracks = Versions(slots=slots, writers=1), (SERVED, CANDIDATE)
    followed = {reader: tracks[reader % 3] if reader % 3 < 2 else None for reader in range(6)}
    for reader, track in followed.items():
        if track is not None:
            ledger.follow(reader, track)
    newest, had = 0, dict.fromkeys(followed, 0)
    pointed: dict[str, set[int]] = {track: set() for track in tracks}
    for kind, which, back in [("publish", 0, 0), *moves]:
        before = ledger.leased
        match kind:
            case "publish":
                newest += 1
                published(ledger, newest)  # weights-2
            case "point":
                track, version = tracks[which], newest - back
                if version < max(1, ledger.tracks.get(track, 0)):
                    continue
                was_there = version in ledger.versions
                assert ledger.point(track, version) == was_there
                if was_there:
                    pointed[track].add(version)
            case "lease":
                ledger.release(which)
                ledger.lease_newer(which, max(0, had[which] - back))
            case "release":
                ledger.release(which)
        assert set(ledger.tracks.values()) <= set(ledger.versions)  # weights-12
        for reader, version in ledger.leased.items():
            if before.get(reader) != version:
                had[reader] = version
                track = followed[reader]
                assert track is None or version in pointed[track]  # weights-12
                assert track is not None or version in ledger.versions

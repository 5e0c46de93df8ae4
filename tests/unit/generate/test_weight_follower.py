"""How a replica's ranks follow the weights."""

import asyncio
import queue
import threading
from typing import Any

import pytest

from goaly.base.actors import SupervisionError
from goaly.base.errors import WeightsError, WritersGone
from goaly.generate import weight_follower
from goaly.generate.weight_follower import WeightFollower
from goaly.weights.versions import Lease
from tests.virtual_time import turns

pytestmark = pytest.mark.timeout(20)


class Versions:
    """So many versions, and then no more."""

    held = None
    verified_updates = 3

    def __init__(self, last: int = 1) -> None:
        self.last = last
        self.released = asyncio.Event()
        self.prefetched: list[int] = []
        self.failure: Exception | None = None
        self.wrong: Exception | None = None
        self.altered: Exception | None = None
        self.looked_at = asyncio.Event()
        self.together: list[Any] = []
        self.dead = self.dropped = False

    def drop(self) -> None:
        self.dropped = True

    async def newest(self, after: int) -> int:
        if self.dead:
            await asyncio.Future()  # the report of its death takes seconds
        await turns(3)
        if after >= self.last:
            raise WritersGone("writer rank 0 has left")
        return after + 1

    async def prefetch(self, version: int, lent: Any = None) -> bool:
        if self.failure is not None:
            raise self.failure
        self.prefetched.append(version)
        return True

    def verify_together(self, gathered: Any) -> None:
        if self.wrong is not None:
            raise self.wrong
        self.together.append(gathered)

    async def verify_applied(self) -> None:
        self.looked_at.set()
        if self.altered is not None:
            raise self.altered

    async def release(self) -> None:
        self.released.set()

    def apply(self) -> int:
        raise AssertionError("the engine's thread applies")


class Draining:
    """An engine loop that applies once its requests have ended."""

    def __init__(self) -> None:
        self.version = 0
        self.drained = asyncio.Event()
        self.waited_for: asyncio.Queue[int] = asyncio.Queue()

    async def apply(self, version: int) -> None:
        await self.drained.wait()
        self.version = version

    async def version_at_least(self, version: int) -> int:
        self.waited_for.put_nowait(version)
        await self.drained.wait()
        return version


class Heard:
    """A follower's link: it hears of versions, and the ranks agree, as `agreed` says."""

    rank = 1

    def __init__(self, *versions: int, agreed: bool = True) -> None:
        self._leases: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        for version in versions:
            self.hear(version)
        self.agreed = agreed
        self.votes: list[bool] = []
        self.voted = threading.Event()

    def hear(self, version: int) -> None:
        self._leases.put(Lease(reader=0, version=version, slot=0))

    def receive(self) -> Lease:
        return self._leases.get()

    def gathered(self, message: Any) -> list[Any]:
        return [message]

    def all_agree(self, yes: bool) -> bool:
        self.votes.append(yes)
        self.voted.set()
        return self.agreed


def follower(versions: Versions, loop: Draining, link: Heard | None) -> WeightFollower:
    return WeightFollower(versions, loop, link)  # type: ignore[bad-argument-type]


async def test_a_version_is_held_no_longer_than_it_is_copied_however_long_its_apply_waits() -> None:
    versions, loop = Versions(), Draining()
    following = asyncio.ensure_future(follower(versions, loop, None).run())
    await asyncio.wait_for(versions.released.wait(), 5)
    assert loop.version == 0
    loop.drained.set()
    await asyncio.wait_for(following, 5)  # and ends with the last version, without an error
    assert loop.version == 1


@pytest.mark.parametrize("link", [None, Heard(1, 2)], ids=["alone", "a follower"])
async def test_what_is_held_ready_is_not_overwritten_before_the_engine_has_applied_it(link: Heard | None) -> None:
    """generate-14"""
    versions, loop = Versions(last=2), Draining()
    following = asyncio.ensure_future(follower(versions, loop, link).run())
    if link is None:
        await asyncio.wait_for(versions.released.wait(), 5)
    else:
        assert await asyncio.wait_for(loop.waited_for.get(), 5) == 1
    for _ in range(20):
        await asyncio.sleep(0)
    assert versions.prefetched == [1]
    loop.drained.set()
    if link is not None:
        assert await asyncio.wait_for(loop.waited_for.get(), 5) == 2
        following.cancel()
    await asyncio.wait([following], timeout=5)
    assert versions.prefetched == [1, 2]


async def test_a_version_that_some_rank_could_not_get_is_passed_over_by_all() -> None:
    """generate-13"""
    versions, loop, link = Versions(), Draining(), Heard(1, agreed=False)
    following = asyncio.ensure_future(follower(versions, loop, link).run())
    await asyncio.wait_for(asyncio.to_thread(link.voted.wait), 5)
    await asyncio.wait([following], timeout=0.05)
    assert loop.waited_for.empty()
    assert versions.prefetched == [1]
    following.cancel()


@pytest.mark.parametrize("link", [None, Heard(1)], ids=["alone", "a follower"])
async def test_a_pull_that_fails_ends_the_following_and_no_vote_is_given(link: Heard | None) -> None:
    """The task is vital (generate-9): the rank's process ends, and nobody waits for its vote."""
    versions = Versions()
    versions.failure = WeightsError("written over")
    with pytest.raises(WeightsError, match="written over"):
        await asyncio.wait_for(follower(versions, Draining(), link).run(), 5)
    assert link is None or link.votes == []


async def test_ranks_verify_together_what_all_of_them_have_and_end_if_it_is_wrong() -> None:
    versions, loop, link = Versions(), Draining(), Heard(1, agreed=False)
    running = asyncio.ensure_future(follower(versions, loop, link).run())
    await asyncio.to_thread(link.voted.wait, 5)
    await turns()
    assert versions.together == []  # a rank does not have it, and calls nothing
    link.agreed = True
    link.hear(2)
    assert await asyncio.wait_for(loop.waited_for.get(), 5) == 2
    assert versions.together == [link.gathered]
    assert link.votes == [True] * 3  # of version 2 another one, once it is verified: then rank 0 has it applied
    versions.wrong = WeightsError("has another sum")
    loop.drained.set()
    link.hear(3)
    with pytest.raises(WeightsError, match="another sum"):
        await asyncio.wait_for(running, 5)
    assert link.votes == [True] * 4  # so rank 0 has nobody apply version 3


@pytest.mark.parametrize("link", [None, Heard(1)], ids=["alone", "a follower"])
async def test_a_rank_looks_at_what_it_has_applied_and_ends_if_it_differs(link: Heard | None) -> None:
    versions, loop = Versions(), Draining()
    versions.altered = WeightsError("differs from what was fetched")
    running = asyncio.ensure_future(follower(versions, loop, link).run())
    if link is not None:
        await asyncio.wait_for(loop.waited_for.get(), 5)
    await turns(20)
    assert not versions.looked_at.is_set()  # nothing is applied yet
    loop.drained.set()
    with pytest.raises(WeightsError, match="differs from"):
        await asyncio.wait_for(running, 5)


@pytest.mark.parametrize("is_known", [False, True], ids=["silent", "reported"])
async def test_a_replica_goes_on_with_the_store_that_replaces_a_dead_one(is_known: bool) -> None:
    versions, newer, loop = Versions(last=9), Versions(last=4), Draining()
    loop.version, versions.dead = 3, not is_known
    versions.failure = SupervisionError("the hub died")
    loop.drained.set()
    following = follower(versions, loop, None)
    running = asyncio.ensure_future(following.run())
    await turns()
    following.use(newer)  # type: ignore[bad-argument-type]
    await asyncio.wait_for(running, 5)  # to the last version
    assert loop.version == 4
    assert newer.prefetched == [4]
    assert following.verified_updates == 6  # of both
    assert versions.prefetched == []
    assert versions.dropped


async def test_a_rank_that_cannot_get_a_version_of_a_dead_store_votes_against_it_and_lives() -> None:
    versions, newer, loop = Versions(), Versions(), Draining()
    versions.failure = SupervisionError("the hub died")
    link = Heard(1, agreed=False)
    following = follower(versions, loop, link)
    running = asyncio.ensure_future(following.run())
    await asyncio.sleep(0.05)
    assert link.votes == []  # the store may live, and only this rank have lost it
    following.use(newer)  # type: ignore[bad-argument-type]
    await asyncio.to_thread(link.voted.wait, 5)
    assert link.votes == [False]
    link.agreed, loop.drained = True, asyncio.Event()
    link.hear(2)
    assert await asyncio.wait_for(loop.waited_for.get(), 5) == 2
    assert newer.prefetched == [2]
    running.cancel()


async def test_a_rank_that_loses_the_store_and_hears_of_no_other_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_follower, "REPLACE_SECONDS", 0.01)
    versions = Versions()
    versions.failure = SupervisionError("the connection broke")
    with pytest.raises(SupervisionError):
        await asyncio.wait_for(follower(versions, Draining(), None).run(), 5)

"""One reader of a host pulls a version, its neighbours copy it: weights-4."""

import asyncio
from typing import Any

import torch
from local_store import Life, LocalStore
from test_remote_reads import Buffer

from goaly.base.process import ProcessMark, this_process
from goaly.weights.buckets import cut
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.rdma import Mirror, RemoteSlots
from goaly.weights.settings import WeightSettings
from goaly.weights.shared_memory import Ring, SegmentHandle
from goaly.weights.slots import UNSEALED
from goaly.weights.versions import Lease

LAYOUT, BUCKETS = cut(layout_of({name: torch.zeros(16) for name in "abcdef"}), 64)
WANTED = (1, 4)
HANDLES = (SegmentHandle(pid=1, descriptor=2, inode=3, bytes=4),)
HOST = "another host"


def test_a_neighbour_maps_the_buckets_that_were_pulled_and_sees_when_the_next_version_is_pulled() -> None:
    ring = Ring.create(LAYOUT, BUCKETS, 2)
    for number, view in enumerate(ring.views(0)):
        view.fill_(number)
    ring.remote = RemoteSlots(tuple(tuple(Buffer(one) for one in ring.stretches(slot)) for slot in range(2)))
    source = ring.source("elsewhere")
    one, other = (Mirror([source], [WANTED]) for _ in range(2))
    (reader,) = one.readers()
    fetched = [bucket for buckets in reader.fetch(0, WANTED) for bucket in buckets]
    assert fetched == [*WANTED]
    handles = one.seal(7)
    (neighbour,) = other.neighbours(handles)
    assert [seal == 7 for seal in neighbour.seals(0)] == [bucket in WANTED for bucket in range(len(BUCKETS))]
    assert [neighbour.view(0, bucket).tolist() for bucket in WANTED] == [[float(bucket)] * 16 for bucket in WANTED]
    assert other.neighbours(handles) is other.neighbours(handles)
    next(iter(reader.fetch(1, WANTED)))
    assert set(neighbour.seals(0)) == {UNSEALED}  # weights-4
    one.close()
    assert Mirror([source], [WANTED]).neighbours(handles) == []
    ring.remote = None
    ring.close()


class Readers:
    """Readers of one store that pull from another host, and the version 0 that all of them may lease."""

    def __init__(self, slots: int = 3) -> None:
        self.store = LocalStore(WeightSettings(slots=slots))

    async def publish(self, version: int = 0) -> None:
        await self.store.join_writer.call_one(0, 1, (), this_process())
        slot, _ = await self.store.begin.call_one(0, version)
        assert (await self.store.staged.call_one(0, version, slot, None)).committed

    async def join(self, process: ProcessMark | None = None) -> Lease:
        """A reader that holds the newest version."""
        joined = await self.store.join_reader.call_one("reader", process or this_process(HOST))
        lease = await self.store.lease_newer.call_one(joined.number, 1, -1)
        assert isinstance(lease, Lease)
        return lease

    def ask(self, lease: Lease, wanted: tuple[int, ...] = WANTED) -> Any:
        """Where to copy its version from."""
        return asyncio.ensure_future(self.store.mirror.call_one(lease.reader, lease, (wanted,)))

    async def end(self) -> None:
        await self.store.leave_writer.call_one(0)


async def settled(*calls: Any) -> list[bool]:
    """Which of the calls have an answer."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [call.done() for call in calls]


async def test_the_first_reader_of_a_host_pulls_and_the_next_ones_wait_for_its_copy() -> None:
    readers = Readers()
    await readers.publish()
    first, second, third = [await readers.join() for _ in range(3)]
    assert await readers.ask(first) is False  # no other reader has said what it pulls
    assert await readers.ask(second) is True
    waiting = [readers.ask(first), readers.ask(third)]
    assert await settled(*waiting) == [False, False]
    await readers.store.mirrored.call_one(second.reader, HANDLES)
    assert await asyncio.gather(*waiting) == [HANDLES, HANDLES]
    assert await readers.ask(third) == HANDLES
    await readers.end()


async def test_readers_of_other_buckets_or_on_other_hosts_wait_for_nobody() -> None:
    readers = Readers()
    await readers.publish()
    first, second, other = [await readers.join() for _ in range(3)]
    far = await readers.join(this_process("a third host"))
    await readers.ask(first)
    assert await readers.ask(second) is True
    assert await readers.ask(other, (0,)) is False
    assert await readers.ask(far) is False
    await readers.end()


async def test_a_reader_waits_for_a_neighbour_only_while_the_neighbour_holds_its_lease() -> None:
    readers, life = Readers(), Life()
    await readers.publish()
    first, second = await readers.join(), await readers.join()
    await readers.ask(first)
    assert await readers.ask(second) is True
    waiting = readers.ask(first)
    assert await settled(waiting) == [False]
    await readers.store.release.call_one(second.reader, 2)  # it failed, or was cancelled
    assert await asyncio.wait_for(waiting, 10) is True  # now this one pulls, and the other may wait for it

    doomed = await readers.join(life.mark)
    alive = await readers.join(this_process())
    await readers.ask(alive)
    assert await readers.ask(doomed) is True
    waiting = readers.ask(alive)
    assert await settled(waiting) == [False]
    life.kill()
    assert await asyncio.wait_for(waiting, 10) is False
    await readers.end()


async def test_a_reader_waits_no_longer_for_a_neighbour_whose_lease_a_writer_revoked() -> None:
    readers = Readers(slots=2)
    await readers.publish(0)
    first, second = await readers.join(), await readers.join()
    await readers.ask(first)
    assert await readers.ask(second) is True
    waiting = readers.ask(first)
    await readers.publish(1)
    assert (await readers.join()).version == 1
    assert await settled(waiting) == [False]
    await readers.store.begin.call_one(0, 2)  # every slot is held: the leases of version 0 are revoked
    assert await settled(waiting) == [True]
    await readers.store.abandon.call_one(0, 2, "the test is over")
    await readers.end()

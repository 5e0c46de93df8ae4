"""The weight store: one actor that knows where each version lies, who may read it, and who waits for the next.

It holds no weights: those lie in the writers' memory (`slots.py`), and readers copy them from there. `versions.py` has
the protocol. This module adds the waiting, and the watch over members' processes.

    weights-3: A member that is cancelled, fails or ends holds nothing. Its leases are free, a newer request supersedes
        its earlier ones, and a version that one rank could not stage is skipped by all.
    weights-9: Where writers are replaced, the death of one loses the versions of all, and readers wait for their
        successors. Calls of the lost writers are refused. No reader gets a version older than the one that it had.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from monarch.actor import Actor

from goaly.base.actors import concurrent_endpoint
from goaly.base.errors import WeightsError
from goaly.base.process import ProcessMark, Watch, this_host, watch
from goaly.weights.buckets import Needs, distinct
from goaly.weights.layout import Layout
from goaly.weights.reshard_plan import share
from goaly.weights.settings import WeightSettings
from goaly.weights.slots import Source
from goaly.weights.transport import needs_remote, reads_whole_buckets
from goaly.weights.versions import Digests, Lease, Staged, StoreState, Versions

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The store's answer to a reader that joins: its number in later calls."""

    number: int
    pulse: bool
    """Whether the process must send pulses, because the store can't watch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedWriter(Joined):
    """The store's answer to a writer rank: the shards that it stages, and the number of slots."""

    layout: Layout
    needs: tuple[Needs, ...]
    """The needs of the known readers that fetch whole buckets."""
    slots: int


@dataclass(slots=True, kw_only=True)
class _Reader:
    name: str
    process: ProcessMark
    watch: Watch
    transport: str
    needs: Needs
    request: int = 0


@dataclass(slots=True, kw_only=True)
class _Writer:
    layout: Layout
    process: ProcessMark
    watch: Watch
    source: Source | None = None
    wanted_remotely: bool = False


class WeightStore(Actor):
    """Versions of the policy's weights: staged by the trainer's ranks, leased by readers."""

    def __init__(self, settings: WeightSettings | None = None, *, replaces_writers: bool = False):
        """`replaces_writers`: after the death of a writer a new group of the same size joins."""
        settings = settings or WeightSettings()
        self._slots = settings.slots
        self._replaces_writers = replaces_writers
        self._group = uuid.uuid4().hex
        """The name of the present group of writers, as in `Lease`."""
        self._changed = asyncio.Event()
        self._versions = Versions(slots=self._slots)
        self._writers: dict[int, _Writer] = {}
        self._shared: tuple[Layout, ...] = ()
        self._needs: list[tuple[Needs, ...]] = []
        self._readers: dict[int, _Reader] = {}
        self._digests = Digests(settings.verify_every)
        self._numbers = itertools.count(1)

    # Writers

    @concurrent_endpoint
    async def join_writer(self, rank: int, world: int, layout: Layout, process: ProcessMark) -> JoinedWriter:
        """Add a trainer rank; returns once all have joined, with the share of its shards that it stages."""
        self._versions.writers = self._versions.writers or world
        if not 0 <= rank < world or world != self._versions.writers:
            raise WeightsError(f"writer rank {rank} of {world} joins a group of {self._versions.writers}")
        known = self._writers.get(rank)
        if known is not None and known.process != process:
            if not self._replaces_writers:
                raise WeightsError(f"writer rank {rank} has joined already, from {known.process}")
            self._lose_writers()  # on another host, and not known to be dead yet
        if rank not in self._writers:
            watching = watch(process, lambda: self._writer_ended(rank, process))
            self._writers[rank] = _Writer(layout=layout, process=process, watch=watching)
        self._wake()
        number = self._versions.losses * world + rank
        await self._until(lambda: self._all_joined(number))  # the other ranks' joins, or a rank's death
        if not self._shared:
            writers = [self._writers[other] for other in range(world)]
            self._shared = share([writer.layout for writer in writers])
            self._needs = [self._needs_at(writer.process.host) for writer in writers]
        mine, needs = self._shared[rank], self._needs[rank]
        far = process.host != this_host()
        return JoinedWriter(number=number, pulse=far, layout=mine, needs=needs, slots=self._slots)

    @concurrent_endpoint
    async def offer(self, writer: int, source: Source) -> None:
        """Tell the readers where this rank's slots are, and how they are reached from other hosts."""
        self._writers[self._rank_of(writer)].source = source
        self._wake()

    @concurrent_endpoint
    async def wanted_remotely(self, writer: int) -> None:
        """Return once a reader needs this rank's slots over the network; the rank then offers them so."""
        await self._until(lambda: self._writers[self._rank_of(writer)].wanted_remotely or None)  # the first such reader

    @concurrent_endpoint
    async def begin(self, writer: int, version: int) -> tuple[int, bool]:
        """The slot to stage this version in, and whether with a digest; waits for the commit of the version before."""
        # Unblocked by slower ranks, or a death.
        slot = await self._until(lambda: self._versions.begin(self._rank_of(writer), version))
        return slot, self._digests.due(version)

    @concurrent_endpoint
    async def staged(self, writer: int, version: int, slot: int, digest: int | None) -> Staged:
        """Record that this rank's shards are in place, and their digest. The last rank's call commits the version."""

        def recorded() -> Staged | None:
            rank = self._rank_of(writer)
            committed = self._versions.staged(rank, version, slot)
            if committed is None:
                return None
            self._digests.add(version, digest, self._versions.versions)
            next_slot = self._versions.reserve(rank)
            return Staged(committed=committed, next_slot=next_slot, digests_next=self._digests.next)

        staged = await self._until(recorded)  # the slower ranks' `staged`, or a rank's death
        self._wake()
        return staged

    @concurrent_endpoint
    async def abandon(self, writer: int, version: int, why: str) -> None:
        """Skip a version that this rank can't stage, unless it is committed already."""
        group, rank = divmod(writer, self._versions.writers)
        if group == self._versions.losses:  # does not raise: nobody waits for the answer
            self._versions.abandon(version, f"rank {rank} gave it up: {why}")
            self._wake()

    @concurrent_endpoint
    async def leave_writer(self, writer: int) -> None:
        """The rank publishes no more, so no rank can; a version that it has already staged can still be committed."""
        rank = self._rank_of(writer)
        self._writers[rank].watch.close()
        self._versions.end(f"writer rank {rank} has left", left=rank)
        self._wake()

    @concurrent_endpoint
    async def lose_writers(self) -> None:
        """The writers are dead, which the store itself may learn later, if they are on another host (weights-9)."""
        if self._writers:
            self._lose_writers()

    # Readers

    @concurrent_endpoint
    async def join_reader(
        self,
        name: str,
        process: ProcessMark,
        transport: str = "auto",
        needs: Needs | None = None,
        track: str | None = None,
    ) -> Joined:
        """Add a reader, of this track or of the newest versions. If not all writers have joined yet, they will cut
        their buckets to its needs."""
        reader = next(self._numbers)
        watching = watch(process, lambda: self._reader_ended(reader))
        self._readers[reader] = _Reader(
            name=name, process=process, watch=watching, transport=transport, needs=needs or {}
        )
        if track is not None:
            self._versions.follow(reader, track)
        return Joined(number=reader, pulse=process.host != this_host())

    @concurrent_endpoint
    async def sources(self, host: str, transport: str, writers: str) -> tuple[Source, ...]:
        """Where the slots of these writers (`Lease.writers`) are, for a reader on this host; waits until those that it
        reaches over the network are registered for that. Empty once the writers are lost."""

        def offered() -> tuple[Source, ...] | None:
            if writers != self._group:
                return ()
            sources = []
            for _, writer in sorted(self._writers.items()):
                source = writer.source
                assert source is not None, "a rank offers its slots before it stages a version"
                if not needs_remote(source, transport=transport, host=host):
                    sources.append(source)
                elif (why := self._versions.ended or source.unreachable) is not None:
                    raise WeightsError(f"weights can't be read from another host any more: {why}")
                elif source.remote is not None:
                    sources.append(source)
                elif not writer.wanted_remotely:
                    writer.wanted_remotely = True
                    self._wake()
            return tuple(sources) if len(sources) == len(self._writers) else None

        return await self._until(offered)  # the writers' second offer, or their death

    @concurrent_endpoint
    async def point(self, track: str, version: int) -> bool:
        """Let the readers of this track have this version, and keep it in memory (weights-12). False if it is gone."""
        pointed = self._versions.point(track, version)
        self._wake()
        return pointed

    @concurrent_endpoint
    async def lease_newer(self, reader: int, request: int, after: int) -> Lease:
        """Wait for a version above `after` and hold it for the reader; first releases what it held before. Raises
        WritersGone if none can come."""
        self._supersede(reader, request)

        def granted() -> Lease | None:
            self._check_current(reader, request)
            version = self._versions.lease_newer(reader, after)
            return None if version is None else self._held(reader, version)

        return await self._until(granted)  # a commit

    @concurrent_endpoint
    async def lease(self, reader: int, request: int, version: int) -> Lease | None:
        """Hold this version for the reader; None if it is gone. Waits while the newest version is lost."""
        known = self._known(reader)
        known.request = max(known.request, request)
        await self._until(lambda: version != self._versions.may_return or None)  # the successors' commit (weights-9)
        self._check_current(reader, request)
        return self._held(reader, version) if self._versions.lease(reader, version) else None

    @concurrent_endpoint
    async def holds(self, reader: int, version: int) -> bool:
        """Whether the reader still holds this version: its lease may have been revoked."""
        return self._versions.leased.get(reader) == version

    @concurrent_endpoint
    async def release(self, reader: int, request: int) -> None:
        """Free what the reader holds, and end the requests that it made before."""
        if reader in self._readers:
            self._supersede(reader, request)

    @concurrent_endpoint
    async def leave_reader(self, reader: int) -> None:
        """Remove the reader."""
        if reader in self._readers:
            self._forget(reader)

    @concurrent_endpoint
    async def pulse(self, *, writer: int | None = None, reader: int | None = None) -> None:
        """A process on another host reports that it is alive."""
        member = self._readers.get(reader or 0) if writer is None else self._writers.get(self._rank_of(writer))
        if member is not None:
            member.watch.beat()

    @concurrent_endpoint
    async def state(self) -> StoreState:
        """The content of the store now."""
        return StoreState(
            newest=self._versions.newest,
            versions=self._versions.versions,
            tracks=self._versions.tracks,
            leased={self._readers[who].name: held for who, held in self._versions.leased.items()},
            readers=len(self._readers),
            bytes=sum(one.source.bytes for one in self._writers.values() if one.source is not None),
        )

    # Waiting, and the ends of processes

    async def _until(self, ready: Callable[[], Answer | None]) -> Answer:
        """The answer of `ready`, which is called again after every change until it is not None."""
        while (answer := ready()) is None:
            await self._changed.wait()
        return answer

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _reader_ended(self, reader: int) -> None:
        ended, held = self._readers[reader], self._versions.leased.get(reader)
        level = logging.INFO if held is None else logging.WARNING
        logger.log(level, "reader %s (%s) ended, holding %s", ended.name, ended.process, held)
        self._forget(reader)  # weights-3

    def _writer_ended(self, rank: int, process: ProcessMark) -> None:
        lost = f"writer rank {rank} ({process}) ended"
        logger.warning("%s", lost)
        if self._replaces_writers and self._versions.ended is None:
            self._lose_writers()
        else:
            self._versions.end(lost)  # weights-3
            self._wake()

    def _lose_writers(self) -> None:
        """Forget the writers and what they staged; others join in their place (weights-9)."""
        for writer in self._writers.values():
            writer.watch.close()
        self._writers.clear()
        self._shared = ()
        self._group = uuid.uuid4().hex
        self._versions.lost()
        self._digests.lost()
        self._wake()

    def _rank_of(self, writer: int) -> int:
        group, rank = divmod(writer, self._versions.writers)
        if group != self._versions.losses:
            raise WeightsError(f"writer rank {rank} was lost, or another rank of its group; others take their place")
        return rank

    def _all_joined(self, writer: int) -> bool | None:
        self._rank_of(writer)
        if len(self._writers) == self._versions.writers:
            return True
        if self._versions.ended is not None:
            raise WeightsError(self._versions.ended)
        return None

    def _needs_at(self, host: str) -> tuple[Needs, ...]:
        """The needs of the readers that fetch whole buckets from this host."""
        readers = self._readers.values()
        return distinct(one.needs for one in readers if reads_whole_buckets(one.transport, one.process.host, host))

    def _forget(self, reader: int) -> None:
        self._readers.pop(reader).watch.close()
        self._digests.left(reader)
        self._versions.leave(reader)
        self._wake()

    def _supersede(self, reader: int, request: int) -> None:
        """Void the reader's earlier requests and its lease; a request that is itself late voids nothing (weights-3)."""
        known = self._known(reader)
        if request >= known.request:
            known.request = request
            self._versions.release(reader)
            self._wake()

    def _check_current(self, reader: int, request: int) -> None:
        if self._known(reader).request != request:
            raise WeightsError(f"reader {self._readers[reader].name} gave up this request")  # weights-3

    def _known(self, reader: int) -> _Reader:
        if reader not in self._readers:
            raise WeightsError(f"reader {reader} has left, or its process ended")
        return self._readers[reader]

    def _held(self, reader: int, version: int) -> Lease:
        slot, digest = self._versions.slot_of(version), self._digests.leased(reader, version)
        return Lease(version=version, slot=slot, reader=reader, writers=self._group, digest=digest)

"""The weight store: one actor that knows which version lies where, who may read it, and who waits for the next.

It holds no weights: those lie in the writers' memory (`ring.py`), and readers copy them from there. The protocol is
`ledger.py`'s; here are the waits, and the news that a process died, which gives back what it held.

Invariants
    WS-1  Whatever a reader's process held is free again once it has ended, however it ended.
    WS-2  A version whose writer died before it was staged by all ranks is never seen; the other ranks get an error.
    WS-3  A call that its caller gave up holds nothing: a newer request of the same reader or rank supersedes it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from monarch.actor import Actor, concurrent_endpoint

from goaly.errors import WeightsError
from goaly.weights.layout import Layout, share
from goaly.weights.ledger import VersionLedger
from goaly.weights.liveness import ExitWatch, ProcessMark
from goaly.weights.ring import Source
from goaly.weights.settings import WeightSettings

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a writer rank is told when all have joined: what it stages, in how many slots."""

    layout: Layout
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """What the store holds at one moment."""

    newest: int | None
    """The newest committed version."""
    versions: tuple[int, ...]
    """The committed versions that are still in memory."""
    leased: dict[str, int]
    """What each reader holds."""
    readers: int
    """How many readers have joined and live."""
    bytes: int
    """Shared memory of all writers."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    name: str
    watch: ExitWatch
    request: int = 0


@dataclass(slots=True, kw_only=True)
class _Writer:
    layout: Layout
    process: ProcessMark
    watch: ExitWatch
    source: Source | None = None
    request: int = 0


class WeightStore(Actor):
    """Versions of the policy's weights: staged by the trainer's ranks, leased by readers."""

    def __init__(self, settings: WeightSettings):
        self._slots = settings.slots
        self._changed = asyncio.Condition()
        self._ledger: VersionLedger | None = None
        self._writers: dict[int, _Writer] = {}
        self._shared: tuple[Layout, ...] = ()
        self._writer_lost: str | None = None
        self._readers: dict[int, _Reader] = {}
        self._joined = 0
        self._waking: set[asyncio.Task[None]] = set()

    # Writers

    @concurrent_endpoint
    async def join_writer(self, rank: int, world: int, layout: Layout, process: ProcessMark) -> Membership:
        """Enter a trainer rank; returns once all have joined, with the rank's share of what it holds."""
        if self._ledger is None:
            self._ledger = VersionLedger(writers=world, slots=self._slots)
        if not 0 <= rank < world or world != self._ledger.writers:
            raise WeightsError(f"writer rank {rank} of {world} joins a group of {self._ledger.writers}")
        if rank not in self._writers:
            watch = ExitWatch(process, lambda: self._writer_ended(rank, process))
            self._writers[rank] = _Writer(layout=layout, process=process, watch=watch)
        elif self._writers[rank].process != process:
            raise WeightsError(f"writer rank {rank} has joined already, from {self._writers[rank].process}")
        await self._wake()
        await self._until(lambda: len(self._writers) == world or None)  # the other ranks' joins, or a rank's death
        if not self._shared:
            self._shared = share([self._writers[other].layout for other in range(world)])
        return Membership(layout=self._shared[rank], slots=self._slots)

    @concurrent_endpoint
    async def offer(self, rank: int, source: Source) -> None:
        """Tell the readers where this rank's shards will lie."""
        self._writers[rank].source = source
        await self._wake()

    @concurrent_endpoint
    async def begin(self, rank: int, request: int, version: int) -> int:
        """The slot to stage this version in; waits until the version before it is committed."""
        ledger, writer = self._require_ledger(), self._writers[rank]
        writer.request = max(writer.request, request)

        def begun() -> int | None:
            if writer.request != request:
                raise WeightsError(f"writer rank {rank} gave up this request")  # WS-3
            return ledger.begin(rank, version)

        return await self._until(begun)  # the slower ranks' `staged`, or a rank's death

    @concurrent_endpoint
    async def staged(self, rank: int, version: int) -> bool:
        """This rank's shards are in place. The last rank's call commits the version and wakes the readers."""
        if self._writer_lost is not None:
            raise WeightsError(self._writer_lost)
        committed = self._require_ledger().staged(rank, version)
        if committed:
            logger.debug("version %d is committed", version)
        await self._wake()
        return committed

    @concurrent_endpoint
    async def abandon(self, rank: int, request: int, version: int, why: str) -> None:
        """This rank can't stage the version: no one will see it, unless it is committed already."""
        self._writers[rank].request = max(self._writers[rank].request, request)
        self._require_ledger().abandon(version, f"rank {rank} gave it up: {why}")
        await self._wake()

    @concurrent_endpoint
    async def leave_writer(self, rank: int) -> None:
        """The rank publishes no more. Its memory may go with its process."""
        self._writers[rank].watch.close()

    # Readers

    @concurrent_endpoint
    async def join_reader(self, name: str, process: ProcessMark) -> int:
        """Enter a reader; the number that it is known by from here on."""
        self._joined += 1
        reader = self._joined
        watch = ExitWatch(process, lambda: self._reader_ended(reader, process))
        self._readers[reader] = _Reader(name=name, watch=watch)
        return reader

    @concurrent_endpoint
    async def sources(self) -> tuple[Source, ...]:
        """Where each writer rank's shards lie; waits until all writers have said so."""

        def offered() -> tuple[Source, ...] | None:
            known = [self._writers[rank].source for rank in sorted(self._writers)]
            complete = self._ledger is not None and len(known) == self._ledger.writers
            sources = tuple(source for source in known if source is not None)
            return sources if complete and len(sources) == len(known) else None

        return await self._until(offered, for_writer=False)  # the writers' first publish

    @concurrent_endpoint
    async def lease_newer(self, reader: int, request: int, after: int) -> int:
        """Wait for a version above `after` and hold it for the reader; releases what it held before."""
        self._supersede(reader, request)
        await self._wake()

        def granted() -> int | None:
            self._check_current(reader, request)
            return None if self._ledger is None else self._ledger.lease_newer(reader, after)

        return await self._until(granted, for_writer=False)  # a commit; a release where all other slots are held

    @concurrent_endpoint
    async def lease(self, reader: int, request: int, version: int) -> int | None:
        """Hold this version for the reader; its slot, or None if the version is gone."""
        self._known(reader).request = max(self._known(reader).request, request)
        ledger = self._require_ledger()

        def granted() -> bool | None:
            self._check_current(reader, request)
            return ledger.lease(reader, version)

        held = await self._until(granted, for_writer=False)  # a release where all other slots are held
        return ledger.slot_of(version) if held else None

    @concurrent_endpoint
    async def release(self, reader: int, request: int) -> None:
        """The reader holds nothing, and waits for nothing that it asked for before."""
        if reader in self._readers:
            self._supersede(reader, request)
            await self._wake()

    @concurrent_endpoint
    async def leave_reader(self, reader: int) -> None:
        """The reader is gone for good."""
        if reader in self._readers:
            self._forget(reader)
            await self._wake()

    @concurrent_endpoint
    async def state(self) -> StoreState:
        """What the store holds now."""
        ledger = self._ledger
        sources = [writer.source for writer in self._writers.values() if writer.source is not None]
        return StoreState(
            newest=None if ledger is None else ledger.newest,
            versions=() if ledger is None else ledger.versions,
            leased={} if ledger is None else {self._readers[who].name: held for who, held in ledger.leased.items()},
            readers=len(self._readers),
            bytes=sum(source.handle.bytes for source in sources),
        )

    # Waiting, and the ends of processes

    async def _until(self, ready: Callable[[], Answer | None], *, for_writer: bool = True) -> Answer:
        """What `ready` answers, asked again after every change until it is not None."""
        async with self._changed:
            while True:
                if for_writer and self._writer_lost is not None:
                    raise WeightsError(self._writer_lost)  # WS-2
                answer = ready()
                if answer is not None:
                    return answer
                await self._changed.wait()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _wake_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._wake())
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    def _reader_ended(self, reader: int, process: ProcessMark) -> None:
        held = None if self._ledger is None else self._ledger.leased.get(reader)
        level = logging.INFO if held is None else logging.WARNING
        logger.log(level, "reader %s (%s) ended, holding %s", self._readers[reader].name, process, held)
        self._forget(reader)  # WS-1
        self._wake_soon()

    def _writer_ended(self, rank: int, process: ProcessMark) -> None:
        self._writer_lost = f"writer rank {rank} ({process}) ended"
        logger.warning("%s", self._writer_lost)
        self._require_ledger().abandon_staging(self._writer_lost)  # WS-2
        self._wake_soon()

    def _forget(self, reader: int) -> None:
        self._readers.pop(reader).watch.close()
        if self._ledger is not None:
            self._ledger.release(reader)

    def _supersede(self, reader: int, request: int) -> None:
        """The reader's earlier requests and lease are void; a request that is itself late voids nothing (WS-3)."""
        known = self._known(reader)
        if request >= known.request:
            known.request = request
            if self._ledger is not None:
                self._ledger.release(reader)

    def _check_current(self, reader: int, request: int) -> None:
        if self._known(reader).request != request:
            raise WeightsError(f"reader {self._readers[reader].name} gave up this request")

    def _known(self, reader: int) -> _Reader:
        if reader not in self._readers:
            raise WeightsError(f"reader {reader} has left, or its process ended")
        return self._readers[reader]

    def _require_ledger(self) -> VersionLedger:
        if self._ledger is None:
            raise WeightsError("no writer has joined")
        return self._ledger

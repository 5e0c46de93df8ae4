"""The version protocol: which versions are staged, committed and leased. Pure bookkeeping, no waiting, no I/O.

    stage (each writer rank) -> commit (with the last rank) -> lease -> release -> the slot may be written again

A method returns None if it can't do its work yet; it can once another call has changed the ledger. All ranks stage a
version in the same slot; a reader holds at most one lease.

A reader follows the newest version, or a track: a name that points to one version. `point` moves it up, once that
version may be read.

    weights-1: A version can be leased only once every writer rank has staged it. A reader applies it only if each
        slot was still sealed with it after the copy, so it sees the whole version or none.
    weights-2: The slot of a leased version is not written, and the newest version is overwritten last. No writer waits
        for a reader: one that finds every slot leased revokes the leases of the oldest version, never the newest's. A
        reader that waits holds the next version from its commit on.
    weights-12: A reader of a track gets only versions that the track was pointed to. As long as it points to one, the
        slot of that version is not written, however many versions follow; the writers' end alone loses it.
"""

from dataclasses import dataclass, field

from goaly.base.errors import WeightsError, WritersGone


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A version that a reader holds, until it is released, replaced or revoked."""

    version: int
    slot: int
    reader: int
    """The number of the reader that holds it."""
    writers: str = ""
    """The name of the group of writers that staged it, unique among all stores."""
    digest: int | None = None
    """The sum of its elements (`digest.py`), if its writers staged it with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The store's answer to a writer rank that has staged its shards."""

    committed: bool
    """Whether it was the last rank, so that readers can have the version now."""
    next_slot: int | None
    """The slot of the next version, if it is known already; the rank then need not ask for it."""
    digests_next: bool
    """Whether the next version is to be staged with a digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """The content of the store at one moment."""

    newest: int | None
    """The newest committed version."""
    versions: tuple[int, ...]
    """The committed versions that are still in memory."""
    tracks: dict[str, int]
    """The version that each track points to."""
    leased: dict[str, int]
    """The version that each reader holds."""
    readers: int
    """How many readers have joined and are alive."""
    bytes: int
    """Memory of all writers' slots. It doesn't grow, however slow a reader is."""


@dataclass(slots=True, kw_only=True)
class _Staging:
    """The version that is being staged: its slot, and the ranks that have staged their shards."""

    version: int
    slot: int
    staged: set[int] = field(default_factory=set)


class Versions:
    """Versions, slots and leases of one group of writers and any number of readers."""

    def __init__(self, *, slots: int, writers: int = 0):
        """`writers` can be set later, before the first version."""
        if slots < 2:
            raise WeightsError(f"slots={slots}: must be at least 2, one to read and one to write")
        self.writers = writers
        self.newest: int | None = None
        self.losses = 0
        """How many groups of writers were lost."""
        self.ended: str | None = None
        """Why no version can begin any more, or None while one can."""
        self._slots: list[int | None] = [None] * slots
        self._staging: _Staging | None = None
        self._reserved: int | None = None
        """The slot of the next version, which holds none."""
        self._leases: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        """Readers that wait for a commit, with the version that it must be above."""
        self._abandoned: tuple[int, str] | None = None
        self._newest_is_lost = False
        self._tracks: dict[str, int] = {}
        self._track_of: dict[int, str] = {}
        """Readers that follow a track."""

    def begin(self, rank: int, version: int) -> int | None:
        """The slot in which this rank stages the version; None while the version before it is being staged."""
        staging = self._staging
        if staging is None or version != staging.version:
            self._check_new(version)
        if staging is None:
            slot, self._reserved = self._reserved, None
            if slot is None:
                slot = self._free_slot()
            if slot is None:
                slot = self._revoked_slot()
            self._slots[slot] = None
            self._staging = _Staging(version=version, slot=slot)
            return slot
        if version == staging.version:
            if rank in staging.staged:
                raise WeightsError(f"rank {rank} has already staged version {version}")
            return staging.slot
        if rank not in staging.staged or version < staging.version:
            raise WeightsError(f"rank {rank} stages version {version} while the others stage {staging.version}")
        return None

    def reserve(self, rank: int) -> int | None:
        """The slot of this rank's next version, whichever that will be; None if it is not known yet."""
        if self._staging is not None and rank not in self._staging.staged:
            return self._staging.slot
        if self._reserved is None:
            self._reserved = self._free_slot(keep_newest=True)
            if self._reserved is not None:
                self._slots[self._reserved] = None
        return self._reserved

    def staged(self, rank: int, version: int, slot: int) -> bool | None:
        """Record that the rank's shards are in place; True if it was the last rank and the version is committed.

        None while the version before it is being staged, because this rank was faster than the others.
        """
        staging = self._staging
        if staging is None or staging.version != version:
            self._check_new(version)
            if slot != self._reserved:
                raise WeightsError(f"rank {rank} staged version {version} in slot {slot}, where it was never begun")
            if self.begin(rank, version) is None:
                return None
            staging = self._staging
            assert staging is not None
        if slot != staging.slot:
            raise WeightsError(f"rank {rank} staged version {version} in slot {slot}, the others in {staging.slot}")
        staging.staged.add(rank)
        if len(staging.staged) < self.writers:
            return False
        self._slots[staging.slot] = version  # weights-1
        self.newest = version
        self._newest_is_lost = False
        self._staging = None
        for reader in [reader for reader, after in self._waiting.items() if after < version]:
            if reader not in self._track_of:  # weights-12
                self.lease(reader, version)  # weights-2
        return True

    def abandon(self, version: int, why: str) -> None:
        """Skip a version that can't be completed. A committed version stays."""
        if self._is_committed(version):
            return
        self._abandoned = max(self._abandoned or (version, why), (version, why))
        staging = self._staging
        if staging is not None and staging.version == version:
            self._staging = None
            if self._reserved is None:
                self._reserved = staging.slot  # ranks that were given this slot before keep it

    def end(self, why: str, *, left: int | None = None) -> None:
        """Begin no version from now on. Only a version that the rank that `left` has staged can still be committed."""
        self.ended = self.ended or why
        if self._staging is not None and left not in self._staging.staged:
            self.abandon(self._staging.version, why)

    def lost(self) -> None:
        """Forget every version: the writers' memory is gone. Their successors begin with the newest version or the one
        after it. Readers hold nothing; those that wait still do."""
        self._slots = [None] * len(self._slots)
        self._staging = self._reserved = self._abandoned = None
        self._leases.clear()
        self._newest_is_lost = True
        self.losses += 1

    def follow(self, reader: int, track: str) -> None:
        """Let the reader follow this track from now on."""
        self._track_of[reader] = track

    def point(self, track: str, version: int) -> bool:
        """Let the track's readers have this version, in place of the one before. False if the version is gone."""
        before = self._tracks.get(track)
        if self.newest is None or version > self.newest:  # weights-1
            raise WeightsError(f"track {track}: version {version} is not committed; the newest is {self.newest}")
        if before is not None and version < before:
            raise WeightsError(f"track {track}: version {version} comes after {before}: versions must go up")
        if version not in self._slots:
            return False
        tracks = {**self._tracks, track: version}
        needed = len(set(tracks.values())) + 2
        if needed > len(self._slots):
            raise WeightsError(
                f"track {track}: needs {needed} slots, there are {len(self._slots)}: raise weights.slots"
            )
        self._tracks = tracks
        for reader in [reader for reader, after in self._waiting.items() if after < version]:
            if self._track_of.get(reader) == track:
                self.lease(reader, version)
        return True

    def lease(self, reader: int, version: int) -> bool:
        """Hold the version for the reader, in place of what it held or waited for. False if it is gone."""
        if self.newest is None or version > self.newest:  # weights-1
            raise WeightsError(f"version {version} is not committed; the newest is {self.newest}")
        if version not in self._slots:
            return False
        self.release(reader)
        self._leases[reader] = version
        return True

    def lease_newer(self, reader: int, after: int) -> int | None:
        """Hold the newest version, or that of its track, for the reader if it is above `after`; None if it waits."""
        version = max(self.versions, default=None)
        if (track := self._track_of.get(reader)) is not None:  # weights-12
            version = self._tracks.get(track)
        if version is not None and version > after and version in self._slots:
            self.lease(reader, version)
            return version
        if self.ended is not None and (self.staging is None or self.staging <= after):
            raise WritersGone(f"no version above {after} will come: {self.ended}")
        self._waiting[reader] = after
        return None

    def release(self, reader: int) -> None:
        """Take back what the reader holds, if anything; it waits for nothing."""
        self._leases.pop(reader, None)
        self._waiting.pop(reader, None)

    def leave(self, reader: int) -> None:
        """Forget the reader."""
        self.release(reader)
        self._track_of.pop(reader, None)

    def slot_of(self, version: int) -> int:
        """Where a committed version lies."""
        return self._slots.index(version)

    @property
    def may_return(self) -> int | None:
        """The newest version, if it is lost and was not staged again."""
        return self.newest if self._newest_is_lost else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The committed versions that are still in memory, oldest first."""
        return tuple(sorted(version for version in self._slots if version is not None))

    @property
    def leased(self) -> dict[int, int]:
        """The version that each reader holds."""
        return dict(self._leases)

    @property
    def tracks(self) -> dict[str, int]:
        """The version that each track points to."""
        return dict(self._tracks)

    @property
    def staging(self) -> int | None:
        """The version that is being staged."""
        return None if self._staging is None else self._staging.version

    def _check_new(self, version: int) -> None:
        """Raise unless this version may be begun, now or later."""
        if self._is_committed(version):
            raise WeightsError(f"version {version} comes after {self.newest}: versions must go up")  # weights-9
        why = self._abandoned[1] if self._abandoned is not None and version <= self._abandoned[0] else self.ended
        if why is not None:
            raise WeightsError(f"version {version} can't be staged any more: {why}")  # weights-3

    def _is_committed(self, version: int) -> bool:
        """Whether this version or a newer one is committed, and not lost again."""
        return self.newest is not None and version <= self.newest - self._newest_is_lost

    def _free_slot(self, *, keep_newest: bool = False) -> int | None:
        """An empty slot, or else that of the oldest version without a lease (weights-2), or None."""
        kept = {*self._leases.values(), *self._tracks.values()} | ({self.newest} if keep_newest else set())
        busy = None if self._staging is None else self._staging.slot
        free = [
            (-1 if version is None else version, slot)
            for slot, version in enumerate(self._slots)
            if slot != busy and (version is None or version not in kept)
        ]
        return min(free)[1] if free else None

    def _revoked_slot(self) -> int:
        """The slot of the oldest version that no track points to, after revoking its leases (weights-2)."""
        oldest = min(set(self.versions) - set(self._tracks.values()))  # weights-12
        for reader in [reader for reader, held in self._leases.items() if held == oldest]:
            del self._leases[reader]  # one that waits for a newer version still does
        return self._slots.index(oldest)


class Digests:
    """The digests of versions, and which versions get one: the first, every n-th, and others that a reader needs."""

    def __init__(self, every: int):
        self._every = every
        self._of: dict[int, int | None] = {}
        """Of each version that is in memory or being staged."""
        self._missed: dict[int, int] = {}
        """By reader, how many versions it has leased since the last one with a digest."""
        self._since, self._wanted = 0, False
        self.next = True
        """Whether the next version is staged with one."""

    def due(self, version: int) -> bool:
        """Whether a rank that begins this version stages it with a digest."""
        return self._of[version] is not None if version in self._of else self.next

    def add(self, version: int, digest: int | None, kept: tuple[int, ...]) -> None:
        """Add a rank's part. Its first rank decides about the next version, so that all ranks get the same answer."""
        if version not in self._of:
            self._since = 1 if digest is not None else self._since + 1
            self.next, self._wanted = self._wanted or self._since >= self._every, False
        known = self._of.get(version, 0)
        self._of[version] = None if known is None or digest is None else (known + digest) % 2**64
        self._of = {one: digest for one, digest in self._of.items() if one in (*kept, version)}

    def leased(self, reader: int, version: int) -> int | None:
        """The digest of a version that this reader leases. One that had none, or missed too many, gets one soon."""
        missed = self._missed.get(reader, self._every) + 1
        if self._of[version] is not None or missed > self._every:
            self._wanted |= self._of[version] is None
            missed = 0
        self._missed[reader] = missed
        return self._of[version]

    def left(self, reader: int) -> None:
        """Forget the reader."""
        self._missed.pop(reader, None)

    def lost(self) -> None:
        """Forget all versions: their writers are dead."""
        self._of.clear()
        self.next = True

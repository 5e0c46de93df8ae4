"""The version protocol: what is staged, what may be read, who holds what. Pure bookkeeping, no waiting, no I/O.

    stage (each writer rank) -> commit (with the last rank) -> lease -> release -> the slot may be written again

A method that can't do its work yet returns None, and can once another call has changed the ledger.

Invariants
    WV-1  A version can be leased only from its commit on, and it is committed once every writer rank has staged it.
    WV-2  The slot of a leased version is not written.
    WV-3  A writer never waits for a reader: at any moment at least one slot is without a lease. A reader whose lease
          would take the last one waits for another reader's release instead.
    WV-4  Committed versions go up. A reader holds at most one lease.
    WV-5  The newest version is the last to be written over: only while readers hold all the others.
"""

from dataclasses import dataclass, field

from goaly.errors import WeightsError


@dataclass(slots=True, kw_only=True)
class _Staging:
    """A version under way: its slot, and which ranks have staged their shards."""

    version: int
    slot: int
    staged: set[int] = field(default_factory=set)


class VersionLedger:
    """Versions, slots and leases of one group of writers and any number of readers."""

    def __init__(self, *, writers: int, slots: int):
        if slots < 2:
            raise WeightsError(f"slots={slots}: must be at least 2, one to read and one to write")
        self.writers = writers
        self.newest: int | None = None
        self._slots: list[int | None] = [None] * slots
        self._staging: _Staging | None = None
        self._leases: dict[int, int] = {}
        self._abandoned: dict[int, str] = {}

    def begin(self, rank: int, version: int) -> int | None:
        """The slot in which this rank stages the version; None while another version is being staged."""
        staging = self._staging
        if staging is None:
            if self.newest is not None and version <= self.newest:
                raise WeightsError(f"version {version} comes after {self.newest}: versions must go up")  # WV-4
            slot = self._free_slot()
            self._slots[slot] = None
            self._staging = _Staging(version=version, slot=slot)
            self._abandoned.pop(version, None)
            return slot
        if version == staging.version:
            if rank in staging.staged:
                raise WeightsError(f"rank {rank} has already staged version {version}")
            return staging.slot
        if rank not in staging.staged or version < staging.version:
            raise WeightsError(f"rank {rank} stages version {version} while the others stage {staging.version}")
        return None

    def staged(self, rank: int, version: int) -> bool:
        """Note that the rank's shards are in place; True if that was the last rank and the version is committed."""
        staging = self._staging
        if staging is None or staging.version != version:
            why = self._abandoned.get(version, "it was never begun")
            raise WeightsError(f"rank {rank} staged version {version}, which no one can commit: {why}")
        staging.staged.add(rank)
        if len(staging.staged) < self.writers:
            return False
        self._slots[staging.slot] = version  # WV-1
        self.newest = version
        self._staging = None
        return True

    def abandon(self, version: int, why: str) -> None:
        """Forget a version that can't be completed. A committed version stays."""
        if self._staging is not None and self._staging.version == version:
            self._staging = None
            self._abandoned = {version: why}

    def abandon_staging(self, why: str) -> None:
        """Forget whatever is being staged."""
        if self._staging is not None:
            self.abandon(self._staging.version, why)

    def lease(self, reader: int, version: int) -> bool | None:
        """Hold the version for the reader, in place of what it held. False if it is gone, None if it must wait."""
        if self.newest is None or version > self.newest:
            raise WeightsError(f"version {version} is not committed; the newest is {self.newest}")
        if version not in self._slots:
            return False
        others = {held for holder, held in self._leases.items() if holder != reader}
        if len(others | {version}) >= len(self._slots):  # WV-3
            return None
        self._leases[reader] = version
        return True

    def lease_newer(self, reader: int, after: int) -> int | None:
        """Hold the newest version, if it is above `after`; None if the reader must wait."""
        if self.newest is None or self.newest <= after or not self.lease(reader, self.newest):
            return None
        return self.newest

    def release(self, reader: int) -> None:
        """Take back what the reader holds, if anything."""
        self._leases.pop(reader, None)

    def slot_of(self, version: int) -> int:
        """Where a committed version lies."""
        return self._slots.index(version)

    @property
    def versions(self) -> tuple[int, ...]:
        """The committed versions that are still there, oldest first."""
        return tuple(sorted(version for version in self._slots if version is not None))

    @property
    def leased(self) -> dict[int, int]:
        """What each reader holds."""
        return dict(self._leases)

    @property
    def staging(self) -> int | None:
        """The version that is being staged."""
        return None if self._staging is None else self._staging.version

    def _free_slot(self) -> int:
        """An empty slot, or else that of the oldest version without a lease (WV-2, WV-5); WV-3 says there is one."""
        held = set(self._leases.values())
        free = [slot for slot, version in enumerate(self._slots) if version not in held]
        assert free, "WV-3: every slot is leased"
        return min(free, key=lambda slot: -1 if self._slots[slot] is None else self._slots[slot])

"""What the store answers."""

from dataclasses import dataclass

from goaly.weights.layout import Layout
from goaly.weights.needs import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a writer rank is told when all have joined: what it stages, in how many slots."""

    layout: Layout
    needs: tuple[Needs, ...]
    """What its readers of whole buckets need, as far as they have said so."""
    slots: int
    pulse: bool
    """Whether the store can't watch the process, and must be told that it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a reader is told when it joins."""

    number: int
    """What it is known by."""
    pulse: bool
    """Whether the store can't watch the process, and must be told that it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a writer rank is told when its shards are in place."""

    committed: bool
    """Whether it was the last rank, and readers can have the version now."""
    next_slot: int | None
    """Where the next version is to be staged, if that can be said already: there is no need to ask then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A version that a reader holds, until it is released, replaced or revoked."""

    version: int
    slot: int
    whole: bool
    """Whether it is committed, or still being staged."""
    reader: int
    """Whose it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """That no newer version will come, and why."""

    why: str


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
    """Memory of all writers' rings: it bounds what versions take, however slow a reader is."""

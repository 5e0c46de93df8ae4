"""The version protocol as a state machine: weights-1 and weights-2 over random orders of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from goaly.base.errors import WeightsError
from goaly.weights.versions import Versions

READERS = 4
reader_numbers = st.integers(0, READERS - 1)


class Protocol(RuleBasedStateMachine):
    """Ranks in lock step at most one version apart, readers in any order, against what slots really hold."""

    @initialize(writers=st.integers(1, 3), slots=st.integers(2, 5))
    def start(self, writers: int, slots: int) -> None:
        self.ledger = Versions(writers=writers, slots=slots)
        self.next_version = [0] * writers
        self.writing: dict[int, tuple[int, int]] = {}
        self.memory: list[dict[int, int]] = [{} for _ in range(slots)]
        self.held: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.committed = -1
        self.given_up: set[int] = set()

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        idle = [rank for rank in range(len(self.next_version)) if rank not in self.writing]
        if not idle:
            return
        self.begins(data.draw(st.sampled_from(idle)))

    def begins(self, rank: int) -> None:
        version = self.next_version[rank]
        versions, starts = self.ledger.versions, self.ledger.staging is None
        oldest_slot = self.ledger.slot_of(versions[0]) if versions else None
        try:
            slot = self.ledger.begin(rank, version)
        except WeightsError:
            self.refused(rank, version)
            return
        if slot is None:
            # weights-2: only a slower rank makes a rank wait, never a reader.
            assert min(self.next_version) < version
            return
        revoked = {reader: held for reader, held in self.held.items() if reader not in self.ledger.leased}
        if revoked:  # weights-2: the oldest version's, and only where all slots were held
            assert starts
            assert len(versions) == len(self.memory)
            assert set(self.held.values()) == set(versions)
            assert set(revoked.values()) == {versions[0]} != {versions[-1]}
            assert slot == oldest_slot
        self.held = {reader: held for reader, held in self.held.items() if reader not in revoked}
        self.writes(rank, version, slot)

    def writes(self, rank: int, version: int, slot: int) -> None:
        self.writing[rank] = (version, slot)
        self.memory[slot][rank] = -1

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), goes_on=st.booleans())
    def staged(self, data: st.DataObject, goes_on: bool) -> None:
        self.has_staged(data.draw(st.sampled_from(sorted(self.writing))), goes_on=goes_on)

    def has_staged(self, rank: int, *, goes_on: bool = False) -> None:
        version, slot = self.writing[rank]
        try:
            committed = self.ledger.staged(rank, version, slot)
        except WeightsError:
            del self.writing[rank]
            self.refused(rank, version)
            return
        if committed is None:
            assert min(self.next_version) < version
            return
        del self.writing[rank]
        self.memory[slot][rank] = version
        self.next_version[rank] += 1
        assert version not in self.given_up  # weights-3
        assert committed == (min(self.next_version) > version)  # weights-1
        if committed:
            assert set(range(self.committed + 1, version)) <= self.given_up
            self.committed = version
            for reader, after in list(self.waiting.items()):
                if after < version:  # weights-2
                    assert self.ledger.leased[reader] == version
                    self.held[reader] = version
                    del self.waiting[reader]
        following = self.ledger.reserve(rank)
        if goes_on and following is not None:
            self.writes(rank, version + 1, following)

    def refused(self, rank: int, version: int) -> None:
        assert version in self.given_up  # weights-3
        self.next_version[rank] += 1

    @rule(reader=reader_numbers, back=st.integers(0, 3))
    def lease(self, reader: int, back: int) -> None:
        version = self.committed - back
        if version < 0:
            return
        if self.ledger.lease(reader, version):
            self.held[reader] = version
            self.waiting.pop(reader, None)
        else:
            assert version not in self.ledger.versions

    @rule(reader=reader_numbers, after=st.integers(-1, 20))
    def lease_newer(self, reader: int, after: int) -> None:
        version = self.ledger.lease_newer(reader, after)
        if version is not None:
            assert version > after
            assert version == max(self.ledger.versions, default=-1)
            self.held[reader] = version
            self.waiting.pop(reader, None)
        else:  # weights-2: it waits for a commit, never for a reader
            assert max(self.ledger.versions, default=-1) <= after
            self.waiting[reader] = after

    @rule(reader=reader_numbers)
    def release(self, reader: int) -> None:
        self.ledger.release(reader)
        self.held.pop(reader, None)
        self.waiting.pop(reader, None)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.writing)))
        version, _ = self.writing.pop(rank)
        self.next_version[rank] += 1
        self.ledger.abandon(version, "the copy failed")
        self.given_up.add(version)
        assert version not in self.ledger.versions
        assert version not in self.held.values()

    @rule(goes_on=st.booleans())
    def lose(self, goes_on: bool) -> None:
        """All writers die; others begin with the version that is newest, or the one after it (weights-9)."""
        self.ledger.lost()
        self.writing.clear()
        self.held.clear()
        self.memory = [{} for _ in self.memory]
        following = max(0, self.committed + goes_on)
        self.next_version = [following] * len(self.next_version)
        self.given_up = {version for version in self.given_up if version < following}
        assert self.ledger.versions == ()

    @invariant()
    def what_is_held_is_whole(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.leased == self.held
        for version in self.held.values():
            slot = self.memory[self.ledger.slot_of(version)]
            assert slot == dict.fromkeys(range(len(self.next_version)), version)  # weights-2

    def teardown(self) -> None:
        """Whatever was given up, the ranks come to a version together."""
        if not hasattr(self, "ledger"):
            return
        last = max(self.next_version) + 1
        for _ in range(3 * (last + 2)):
            for rank, following in enumerate(self.next_version):
                if rank in self.writing:
                    self.has_staged(rank)
                elif following <= last:
                    self.begins(rank)
        assert self.ledger.newest == last


Protocol.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestVersionProtocol = Protocol.TestCase


def published(ledger: Versions, *versions: int) -> None:
    """Stage these versions with all ranks."""
    for version in versions:
        for rank in range(ledger.writers):
            stage(ledger, rank, version)


def test_a_reader_whose_lease_is_revoked_while_it_waits_gets_the_version_that_it_waits_for() -> None:  # weights-2
    ledger = Versions(slots=2, writers=1)
    published(ledger, 0)
    assert ledger.lease(0, 0)
    assert ledger.lease_newer(0, 1) is None
    published(ledger, 1)
    assert ledger.lease(1, 1)
    published(ledger, 2)  # weights-2: in the slot of version 0, which reader 0 holds
    assert ledger.leased == {0: 2, 1: 1}


def stage(ledger: Versions, rank: int, version: int) -> bool | None:
    """Begin the version and stage it: whether it is committed."""
    slot = ledger.begin(rank, version)
    assert slot is not None
    return ledger.staged(rank, version, slot)


def test_a_version_is_there_once_the_last_rank_has_staged_it() -> None:
    ledger = Versions(writers=2, slots=3)
    ledger.begin(0, 0)
    assert not stage(ledger, 1, 0)
    assert ledger.lease_newer(7, -1) is None
    assert stage(ledger, 0, 0)
    assert ledger.lease_newer(7, -1) == 0


def test_a_fast_rank_waits_for_the_slow_one_with_its_next_version() -> None:
    ledger = Versions(writers=2, slots=3)
    stage(ledger, 0, 0)
    assert ledger.begin(0, 1) is None
    stage(ledger, 1, 0)
    assert ledger.begin(0, 1) is not None


def test_the_newest_is_written_over_last() -> None:
    ledger = Versions(writers=1, slots=3)
    published(ledger, 0, 1, 2)
    assert ledger.begin(0, 3) == ledger._slots.index(None)
    assert ledger.versions == (1, 2)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_stuck_readers_in_every_other_slot_keep_the_newest_version_from_nobody(slots: int) -> None:  # weights-2
    ledger = Versions(writers=1, slots=slots)
    for version in range(slots):
        published(ledger, version)
        assert ledger.lease(version, version)  # all slots are held by readers that never let go
    for version in range(slots, slots + 48):
        published(ledger, version)
        assert ledger.lease_newer(99, version - 1) == version
        assert ledger.lease_newer(98, -1) == version


def test_a_slow_reader_keeps_its_version_while_nobody_else_needs_the_slot() -> None:  # weights-2
    ledger = Versions(writers=1, slots=2)
    published(ledger, 0)
    assert ledger.lease(1, 0)
    published(ledger, 1, 2, 3)
    assert ledger.leased == {1: 0}
    assert ledger.lease_newer(2, -1) == 3
    assert ledger.leased == {1: 0, 2: 3}
    published(ledger, 4)
    assert ledger.leased == {2: 3}  # the oldest version's reader is the one that loses it
    assert ledger.lease_newer(1, 0) == 4


def test_a_waiting_reader_holds_the_version_before_a_quick_rank_can_write_over_it() -> None:  # weights-2
    ledger = Versions(writers=1, slots=2)
    published(ledger, 0)
    assert ledger.lease(1, 0)
    assert ledger.lease_newer(2, 0) is None
    assert ledger.lease_newer(3, 0) is None
    ledger.release(3)
    published(ledger, 1, 2)
    assert ledger.leased == {2: 1}  # reader 1's slot was taken for version 2
    assert ledger.slot_of(1) != ledger.slot_of(2)


def test_a_version_that_was_written_over_is_gone() -> None:
    ledger = Versions(writers=1, slots=2)
    published(ledger, 0, 1, 2)
    assert ledger.lease(1, 0) is False


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([("begin", 0, 5), ("begin", 1, 6)], "rank 1 stages version 6 while the others stage 5"),
        ([("begin", 0, 5), ("staged", 0, 5, 0), ("begin", 0, 5)], "rank 0 has already staged version 5"),
        ([("staged", 0, 5, 0)], "in slot 0, where it was never begun"),
        ([("begin", 0, 5), ("staged", 0, 5, 0), ("staged", 1, 5, 1)], "in slot 1, the others in 0"),
        ([("begin", 0, 5), ("abandon", 5, "disk on fire"), ("staged", 0, 5, 0)], "disk on fire"),
        ([("begin", 0, 5), ("abandon", 5, "disk on fire"), ("begin", 1, 5)], "disk on fire"),
        ([("abandon", 5, "disk on fire"), ("begin", 1, 5)], "disk on fire"),
    ],
)
def test_ranks_that_break_the_protocol_are_told_how(steps, said: str) -> None:
    ledger = Versions(writers=2, slots=3)
    *before, last = steps
    for name, *arguments in before:
        getattr(ledger, name)(*arguments)
    with pytest.raises(WeightsError, match=said):
        getattr(ledger, last[0])(*last[1:])


def test_versions_must_go_up() -> None:  # weights-9
    ledger = Versions(writers=1, slots=2)
    published(ledger, 3)
    with pytest.raises(WeightsError, match="version 3 comes after 3"):
        ledger.begin(0, 3)


def test_a_version_that_is_not_committed_cannot_be_leased() -> None:
    ledger = Versions(writers=1, slots=2)
    published(ledger, 3)
    with pytest.raises(WeightsError, match="version 4 is not committed; the newest is 3"):
        ledger.lease(1, 4)


def test_a_rank_knows_the_next_slot_when_it_has_staged_and_needs_not_ask() -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    first = ledger.begin(0, 1)
    ledger.begin(1, 1)
    ledger.staged(0, 1, first)
    following = ledger.reserve(0)
    assert following not in (None, first, ledger.slot_of(0))
    assert ledger.staged(0, 2, following) is None  # rank 1 still stages version 1
    assert ledger.staged(1, 1, first)
    assert ledger.staged(0, 2, following) is False
    assert ledger.reserve(1) == following
    assert ledger.staged(1, 2, following)
    assert ledger.newest == 2


def test_no_slot_is_reserved_that_readers_hold_or_that_is_the_newest() -> None:
    ledger = Versions(writers=1, slots=2)
    published(ledger, 0)
    assert ledger.lease(7, 0)
    published(ledger, 1)
    assert ledger.reserve(0) is None
    ledger.release(7)
    assert ledger.reserve(0) is not None
    assert ledger.versions == (1,)


def test_an_abandoned_version_is_held_by_no_reader_and_a_waiting_one_gets_the_next() -> None:  # weights-1, weights-3
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    ledger.begin(0, 1)
    assert ledger.lease_newer(7, 0) is None
    ledger.abandon(1, "the copy failed")
    assert (ledger.versions, ledger.leased) == ((0,), {})
    published(ledger, 2)
    assert ledger.leased == {7: 2}


def test_when_the_successor_of_the_newest_is_abandoned_in_its_place_readers_get_what_is_left() -> None:
    ledger = Versions(writers=1, slots=2)
    published(ledger, 0)
    assert ledger.lease(7, 0)
    published(ledger, 1)
    assert ledger.begin(0, 2) == 1  # reader 7 holds the other slot
    ledger.abandon(2, "the trainer died")
    assert ledger.lease_newer(8, -1) == 0
    assert ledger.lease_newer(9, 0) is None

"""The version protocol as a state machine over random orders of calls, and its errors: weights-1, 2, 3 and 9."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from goaly.base.errors import WeightsError, WritersGone
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
        self.losses = 0
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
        self.lost_only_the_oldest(versions)
        revoked = {reader: held for reader, held in self.held.items() if reader not in self.ledger.leased}
        if revoked:  # weights-2: the oldest version's, and only where all slots were held
            assert starts
            assert len(versions) == len(self.memory)
            assert set(self.held.values()) == set(versions)
            assert set(revoked.values()) == {versions[0]} != {versions[-1]}
            assert slot == oldest_slot
        self.held = {reader: held for reader, held in self.held.items() if reader not in revoked}
        self.writes(rank, version, slot)

    def lost_only_the_oldest(self, before: tuple[int, ...]) -> None:
        """A version is overwritten only where no slot is empty: the oldest that no reader holds, if any (weights-2)."""
        for lost in set(before) - set(self.ledger.versions):
            free = [version for version in before if version not in self.held.values()]
            assert lost == min(free or before)
            assert len(before) >= len(self.memory) - 1  # one may be under way

    def writes(self, rank: int, version: int, slot: int) -> None:
        self.writing[rank] = (version, slot)
        self.memory[slot][rank] = -1

    @rule()
    def publish(self) -> None:
        """Every rank comes to the end of the version that the slowest one is at."""
        version = min(self.next_version)
        for rank, following in enumerate(self.next_version):
            if following == version:
                if rank not in self.writing:
                    self.begins(rank)
                if rank in self.writing:
                    self.has_staged(rank)

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
            assert version == self.ledger.newest == self.ledger.versions[-1]
            assert self.ledger.may_return is None
            assert set(range(self.committed + 1, version)) <= self.given_up
            self.committed = version
            for reader, after in list(self.waiting.items()):
                if after < version:  # weights-2
                    assert self.ledger.leased[reader] == version
                    self.held[reader] = version
                    del self.waiting[reader]
        versions = self.ledger.versions
        following = self.ledger.reserve(rank)
        self.lost_only_the_oldest(versions)
        assert self.committed not in versions or self.committed in self.ledger.versions  # weights-2: the newest stays
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
    @rule(data=st.data(), seldom=st.integers(0, 3))
    def abandon(self, data: st.DataObject, seldom: int) -> None:
        if seldom:
            return
        rank = data.draw(st.sampled_from(sorted(self.writing)))
        version, _ = self.writing.pop(rank)
        self.next_version[rank] += 1
        self.ledger.abandon(version, "the copy failed")
        self.given_up.add(version)
        assert version not in self.ledger.versions
        assert version not in self.held.values()

    @rule(goes_on=st.booleans(), seldom=st.integers(0, 5))
    def lose(self, goes_on: bool, seldom: int) -> None:
        """All writers die; others begin with the version that is newest, or the one after it (weights-9)."""
        if seldom:
            return
        self.ledger.lost()
        self.losses += 1
        assert self.ledger.losses == self.losses
        assert self.ledger.may_return == (None if self.committed < 0 else self.committed)
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


Protocol.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestVersionProtocol = Protocol.TestCase


def stage(ledger: Versions, rank: int, version: int) -> bool | None:
    """Begin the version and stage it: whether it is committed."""
    slot = ledger.begin(rank, version)
    assert slot is not None
    return ledger.staged(rank, version, slot)


def published(ledger: Versions, *versions: int) -> None:
    """Stage these versions with all ranks."""
    for version in versions:
        for rank in range(ledger.writers):
            stage(ledger, rank, version)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([("begin", 0, 5), ("begin", 1, 6)], "rank 1 stages version 6 while the others stage 5"),
        ([("begin", 0, 5), ("staged", 0, 5, 0), ("begin", 0, 5)], "rank 0 has already staged version 5"),
        ([("staged", 0, 5, 0)], "in slot 0, where it was never begun"),
        ([("begin", 0, 5), ("staged", 0, 5, 0), ("staged", 1, 5, 1)], "in slot 1, the others in 0"),
        ([("begin", 0, 5), ("abandon", 5, "disk on fire"), ("staged", 0, 5, 0)], "disk on fire"),
        (
            [("begin", 0, 5), ("staged", 0, 5, 0), ("reserve", 0), ("abandon", 5, "disk on fire"), ("staged", 1, 5, 0)],
            "disk on fire",
        ),
        ([("begin", 0, 5), ("abandon", 5, "disk on fire"), ("begin", 1, 5)], "disk on fire"),
        ([("abandon", 5, "disk on fire"), ("begin", 1, 5)], "disk on fire"),
        ([("begin", 0, 2)], "version 2 comes after 2: versions must go up"),  # weights-9
        ([("begin", 0, 3), ("begin", 1, 2)], "version 2 comes after 2: versions must go up"),
        ([("lease", 7, 3)], "version 3 is not committed; the newest is 2"),  # weights-1
    ],
)
def test_members_that_break_the_protocol_get_an_error_that_says_how(steps, said: str) -> None:
    ledger = Versions(writers=2, slots=4)
    published(ledger, 0, 1, 2)
    ledger._slots = [None, *ledger._slots[:3]]  # version 5 begins in slot 0
    *before, last = steps
    for name, *arguments in before:
        getattr(ledger, name)(*arguments)
    with pytest.raises(WeightsError, match=said):
        getattr(ledger, last[0])(*last[1:])


def test_one_slot_is_refused() -> None:
    with pytest.raises(WeightsError, match="slots=1: must be at least 2, one to read and one to write"):
        Versions(slots=1)


def test_a_rank_knows_the_next_slot_when_it_has_staged_and_need_not_ask() -> None:
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


@pytest.mark.parametrize("behind", [False, True], ids=["of that version", "of the next version"])
def test_the_slots_that_ranks_know_stay_theirs_when_a_version_is_abandoned(behind: bool) -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    slot = ledger.begin(0, 1)
    if behind:
        ledger.staged(0, 1, slot)
        slot = ledger.reserve(0)
        assert slot != ledger.begin(1, 1)
    assert behind or ledger.reserve(1) == slot
    ledger.abandon(1, "the copy failed")
    assert ledger.staged(0 if behind else 1, 2, slot) is False
    assert ledger.begin(1 if behind else 0, 2) == slot


def test_a_version_ends_for_the_first_reason_if_the_rank_that_left_has_not_staged_it() -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    stage(ledger, 1, 1)
    ledger.end("rank 0 left", left=0)
    ledger.end("rank 1 was killed", left=1)
    assert (ledger.ended, ledger.staging) == ("rank 0 left", None)
    for version in (1, 2):
        with pytest.raises(WeightsError, match=f"version {version} can't be staged any more: rank 0 left"):
            ledger.begin(0, version)
    with pytest.raises(WritersGone, match="no version above 0 will come: rank 0 left"):
        ledger.lease_newer(7, 0)
    assert ledger.lease_newer(7, -1) == 0


def test_a_version_that_the_rank_that_left_has_staged_is_still_committed_and_waited_for() -> None:
    ledger = Versions(writers=2, slots=3)
    stage(ledger, 0, 5)
    ledger.end("rank 0 left", left=0)
    assert ledger.staging == 5
    assert ledger.lease_newer(7, 4) is None
    with pytest.raises(WritersGone):
        ledger.lease_newer(8, 5)
    assert stage(ledger, 1, 5)
    assert ledger.leased == {7: 5}
    with pytest.raises(WritersGone):
        ledger.lease_newer(7, 5)
    ledger = Versions(writers=2, slots=2)
    stage(ledger, 0, 5)
    ledger.end("rank 0 left", left=0)
    ledger.end("rank 1 left", left=1)
    with pytest.raises(WeightsError, match="version 5 can't be staged any more: rank 1 left"):
        ledger.begin(1, 5)

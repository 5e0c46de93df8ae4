"""The version protocol where writers leave, are lost, or give a version up."""

import pytest

from goaly.base.errors import WeightsError, WritersGone
from goaly.weights.versions import Versions
from tests.unit.weights.test_versions import published, stage


def test_one_slot_is_refused() -> None:
    with pytest.raises(WeightsError, match="slots=1: must be at least 2, one to read and one to write"):
        Versions(slots=1)


def test_when_a_rank_leaves_before_it_has_staged_the_version_is_given_up_for_that_reason() -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    stage(ledger, 1, 1)
    ledger.end("the trainer left", left=0)
    assert (ledger.ended, ledger.staging) == ("the trainer left", None)
    for version in (1, 2):
        with pytest.raises(WeightsError, match=f"version {version} can't be staged any more: the trainer left"):
            ledger.begin(0, version)
    with pytest.raises(WritersGone, match="no version above 0 will come: the trainer left"):
        ledger.lease_newer(7, 0)
    assert ledger.lease_newer(7, -1) == 0


def test_a_version_that_the_rank_that_left_has_staged_is_still_committed_and_waited_for() -> None:
    ledger = Versions(writers=2, slots=3)
    stage(ledger, 0, 5)
    ledger.end("the trainer left", left=0)
    assert ledger.staging == 5
    assert ledger.lease_newer(7, 4) is None
    assert stage(ledger, 1, 5)
    assert ledger.leased == {7: 5}
    with pytest.raises(WritersGone):
        ledger.lease_newer(7, 5)


def test_the_first_reason_for_the_end_is_the_one_that_is_told() -> None:
    ledger = Versions(writers=1, slots=2)
    assert ledger.ended is None
    ledger.end("it was killed")
    ledger.end("its host is silent")
    assert ledger.ended == "it was killed"


def test_a_version_is_given_up_for_the_reason_of_the_end_also_when_that_was_not_the_first() -> None:
    ledger = Versions(writers=2, slots=2)
    stage(ledger, 0, 5)
    ledger.end("rank 0 left", left=0)
    ledger.end("rank 1 left", left=1)
    with pytest.raises(WeightsError, match="version 5 can't be staged any more: rank 1 left"):
        ledger.begin(1, 5)


def test_lost_versions_may_return_until_one_is_committed_again_and_losses_are_counted() -> None:  # weights-9
    ledger = Versions(writers=1, slots=2)
    assert (ledger.losses, ledger.may_return) == (0, None)
    published(ledger, 3)
    assert ledger.may_return is None
    for losses in (1, 2):
        ledger.lost()
        assert (ledger.losses, ledger.may_return) == (losses, 3)
    published(ledger, 3)
    assert ledger.may_return is None


def test_a_slot_that_ranks_were_given_for_an_abandoned_version_is_that_of_the_next_one() -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 0)
    slot = ledger.begin(0, 1)
    assert ledger.reserve(1) == slot
    ledger.abandon(1, "the copy failed")
    assert ledger.staged(1, 2, slot) is False
    assert ledger.begin(0, 2) == slot


def test_a_slot_that_a_quick_rank_was_given_stays_that_of_the_version_after_an_abandoned_one() -> None:
    ledger = Versions(writers=2, slots=3)
    stage(ledger, 0, 1)
    following = ledger.reserve(0)
    assert following != ledger.begin(1, 1)
    ledger.abandon(1, "the copy failed")
    assert ledger.reserve(1) == following
    assert ledger.staged(0, 2, following) is False


def test_a_rank_that_comes_to_a_committed_version_while_others_stage_the_next_is_told_that() -> None:
    ledger = Versions(writers=2, slots=3)
    published(ledger, 3)
    ledger.begin(0, 4)
    with pytest.raises(WeightsError, match="version 3 comes after 3: versions must go up"):
        ledger.begin(1, 3)

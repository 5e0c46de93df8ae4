"""Windowed FIFO, completion order and the ledger, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.backlog.ledger import Ledger, State
from goaly.backlog.order import Order


def order_of(window: int, admitted: int, finished: list[int]) -> Order:
    order = Order(window)
    for index in range(admitted):
        order.admit(index)
    for index in finished:
        order.finish(index)
    return order


def test_a_window_of_one_is_strict_fifo():
    order = order_of(1, 4, [1, 2, 3])
    assert order.take(1) is None
    order.finish(0)
    assert order.take(4) == [0, 1, 2, 3]


def test_a_straggler_lets_only_the_window_pass():  # backlog-4
    order = order_of(3, 6, [1, 2, 3, 4, 5])
    assert order.take(2) == [1, 2]
    assert not order.ready(1)
    order.finish(0)
    assert order.take(4) == [0, 3, 4, 5]


def test_taking_is_all_or_nothing():
    order = order_of(3, 6, [1, 2, 3])
    assert order.take(3) is None
    assert order.take(2) == [1, 2]


def test_dropping_the_head_moves_the_window():
    order = order_of(2, 4, [2, 1])
    assert order.take(2) is None
    order.drop(0)
    assert order.take(2) == [1, 2]


def test_of_the_deliverable_the_oldest_goes_first_whenever_it_finished():
    assert order_of(8, 4, [3, 1, 2]).take(3) == [1, 2, 3]


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        Order(0)


def test_completion_order_gives_the_first_to_finish_and_waits_for_none_under_way():
    order = Order(None)
    for index in range(5):
        order.admit(index)
    for index in (3, 1, 4):
        order.finish(index)
    order.drop(1)
    assert order.take(3) is None
    assert order.take(2) == [3, 4]
    order.drop(2)
    order.finish(0)
    assert order.take(1) == [0]
    assert not order.ready(1)


def test_a_ticket_ends_exactly_once():  # backlog-5
    ledger = Ledger()
    ledger.admit()
    ledger.move(0, State.FAILED, "a reason")
    with pytest.raises(ValueError, match="ticket 0 is failed, and can't become rejected"):
        ledger.move(0, State.REJECTED, "another")
    assert ledger.reasons == {"failed: a reason": 1}


def test_a_state_is_never_skipped():
    ledger = Ledger()
    ledger.admit()
    with pytest.raises(ValueError, match="ticket 0 is running, and can't become trained"):
        ledger.move(0, State.TRAINED)
    with pytest.raises(ValueError, match="ticket 7 was never admitted; 1 were"):
        ledger.move(7, State.RUNNING)


def test_tickets_that_end_for_the_same_reason_are_counted():
    ledger = Ledger()
    for index in range(3):
        ledger.admit()
        ledger.move(index, State.FAILED if index else State.REJECTED, "it broke")
    assert ledger.reasons == {"rejected: it broke": 1, "failed: it broke": 2}


@pytest.mark.parametrize("window", [None, 2])
def test_a_ticket_is_admitted_once_and_after_those_before_it(window):
    order = Order(window)
    order.admit(3)
    for index in (3, 2):
        with pytest.raises(AssertionError, match=f"ticket {index} admitted out of order"):
            order.admit(index)


def test_reasons_belong_to_rejections_and_failures_only():
    ledger = Ledger()
    ledger.admit()
    with pytest.raises(ValueError, match="a reason belongs to"):
        ledger.move(0, State.QUEUED, "why")
    with pytest.raises(ValueError, match="a reason belongs to"):
        ledger.move(0, State.FAILED)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(list(State))), max_size=60))
def test_the_identity_holds_whatever_is_tried(attempts):
    ledger = Ledger()
    for index, to in attempts:
        try:
            ledger.move(index, to, "why" if to in (State.REJECTED, State.FAILED) else None)
        except ValueError:
            if ledger.admitted <= index:
                ledger.admit()
        counts = ledger.counts()
        assert counts.pop("admitted") == sum(counts.values()) == ledger.admitted
        assert ledger.live == ledger.admitted - counts["rejected"] - counts["failed"]
        assert len(ledger.open()) == counts["running"] + counts["queued"]

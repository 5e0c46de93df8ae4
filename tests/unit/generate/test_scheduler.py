"""The order in which a replica's engines are told what to do."""

from hypothesis import given
from hypothesis import strategies as st

from goaly.generate.request import Request, Sampling
from goaly.generate.scheduler import Apply, Cancel, Command, Scheduler, Stop

SAMPLING = Sampling(max_tokens=4)


def add(name: str, min_version: int = 0) -> Request:
    return Request(name, [1, 2], SAMPLING, min_version)


def ask(mode: str, *commands: Command) -> Scheduler:
    scheduler = Scheduler(mode, max_running=64)
    for command in commands:
        scheduler.submit(command)
    return scheduler


def test_a_request_waits_for_its_version_and_starts_in_the_round_that_applies_it():
    scheduler = ask("recompute", add("new", min_version=2), add("any"))
    assert scheduler.next(running=0) == ([add("any")], [])
    assert not scheduler.has_work(running=0)
    scheduler.submit(Apply(1))
    assert scheduler.next(running=1) == ([Apply(1)], [])
    scheduler.submit(Apply(2))
    assert scheduler.next(running=1) == ([Apply(2), add("new", min_version=2)], [])


def test_draining_holds_everything_back_until_the_engine_is_idle():
    scheduler = ask("drain", add("first"))
    scheduler.next(running=0)
    scheduler.submit(Apply(1))
    scheduler.submit(add("second"))
    assert scheduler.next(running=1) == ([], [])
    assert scheduler.next(running=0) == ([Apply(1), add("second")], [])


def test_a_newer_update_replaces_one_that_was_not_applied_yet():
    scheduler = ask("drain", Apply(1), Apply(3))
    assert scheduler.next(running=1) == ([], [])
    assert scheduler.next(running=0) == ([Apply(3)], [])
    assert not scheduler.has_work(running=0)


def test_a_request_that_is_cancelled_before_it_starts_never_reaches_the_engine():
    scheduler = ask("keep", add("held", min_version=9), Cancel(("held", "running")), Cancel(("running",)))
    assert scheduler.has_work(running=0)
    assert scheduler.next(running=1) == ([Cancel(("running",))], ["held"])
    assert scheduler.waiting == 0


def test_what_there_is_no_room_for_waits_and_starts_in_the_order_it_came():
    scheduler = Scheduler("keep", max_running=2)
    for command in (add("late", min_version=1), add("a"), add("b"), add("c")):
        scheduler.submit(command)
    assert scheduler.next(running=0) == ([add("a"), add("b")], [])
    assert scheduler.next(running=2) == ([], [])
    scheduler.submit(Apply(1))
    assert scheduler.next(running=1) == ([Apply(1), add("late", min_version=1)], [])
    assert scheduler.next(running=1) == ([add("c")], [])


def test_stopping_comes_before_everything_else():
    scheduler = ask("keep", add("one"), Apply(1), Stop())
    assert scheduler.next(running=0) == ([Stop()], [])


@given(
    mode=st.sampled_from(["recompute", "keep", "drain"]),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 4)),
            st.tuples(st.just("apply"), st.integers(1, 4)),
            st.tuples(st.just("cancel"), st.integers(0, 20)),
            st.tuples(st.just("round"), st.integers(0, 3)),
        ),
        max_size=40,
    ),
)
def test_every_request_starts_once_or_is_withdrawn_once_and_never_under_older_weights(mode, events):
    room = 3
    scheduler = Scheduler(mode, max_running=room)
    version, asked, newest = 0, 0, 0
    begun: list[str] = []
    withdrawn: list[str] = []

    def play_round(running: int) -> None:
        nonlocal version
        commands, never_started = scheduler.next(running)
        assert sum(isinstance(command, Request) for command in commands) <= room - running
        withdrawn.extend(never_started)
        for command in commands:
            match command:
                case Apply(new):
                    assert new > version
                    assert not (mode == "drain" and running)
                    version = new
                case Request():
                    assert command.min_version <= version
                    begun.append(command.request_id)

    for what, value in events:
        if what == "add":
            scheduler.submit(add(str(asked), min_version=value))
            asked += 1
        elif what == "apply" and newest + value > newest:
            newest += value
            scheduler.submit(Apply(newest))
        elif what == "cancel":
            scheduler.submit(Cancel((str(value),)))
        else:
            play_round(value)
    scheduler.submit(Apply(newest + 5))
    while scheduler.has_work(running=0):
        play_round(0)
    assert not scheduler.has_work(running=0)
    assert sorted(begun + withdrawn, key=int) == [str(i) for i in range(asked)]


def test_a_request_that_waits_for_newer_weights_is_not_held_back_by_the_limit():
    scheduler = Scheduler("keep", max_running=1)
    for command in (add("late", min_version=1), add("a")):
        scheduler.submit(command)
    assert scheduler.holds_back
    assert scheduler.queued == 1
    scheduler.next(running=0)
    assert not scheduler.holds_back
    assert (scheduler.queued, scheduler.waiting) == (0, 1)

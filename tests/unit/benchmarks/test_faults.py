"""The matrix of faults: which cases there are, and how results are shown."""

from bench.faults import FAILS, GOES_ON, NOT_STARTING, PARTS, Result, cases, table


def test_the_matrix_has_every_process_killed_and_stopped_in_each_state() -> None:
    named = {one.name for one in cases()}
    assert len(named) == len(list(cases()))
    for one in cases():
        for kind in ("killed", "stopped"):
            for when in ("decode",) if one.app == "serve" else ("starting", "idle", "working"):
                assert f"{one.part}; {kind}; {when}" in named or (when == "starting" and one.part in NOT_STARTING)


def test_every_part_also_raises_in_the_midst_of_its_work() -> None:
    raising = {one.part for one in cases() if one.fault.kind == "raising"}
    assert raising == PARTS.keys() - {"verifier", "fork server"}  # a verifier that raises is `reward.on_error`'s


def test_every_part_that_computes_also_gets_stuck_and_on_each_of_two_ranks() -> None:
    stuck = {one.part for one in cases() if one.fault.kind == "stuck"}
    assert stuck == PARTS.keys() - {"rollout worker", "verifier", "fork server"}


def test_the_table_shows_what_went_wrong_instead_of_how_it_should_have_ended() -> None:
    good = Result(name="hub; killed; working", ends=FAILS, seconds=1.2, error="error: hub died")
    also = Result(name="hub; killed; idle", ends=FAILS, seconds=2.6, error="error: hub died")
    bad = Result(name="hub; stopped; working", ends=FAILS, seconds=3, error="error: x", problems=["process 7 is left"])
    raised = Result(name="verifier; raising; task verifier", ends=GOES_ON, seconds=0.4, error="")
    assert table([good, also, bad, raised]).splitlines()[2:] == [
        "| hub | the run fails: working 1 s, idle 3 s | **process 7 is left; error: x**: working 3 s |  |  |",
        "| verifier |  |  |  | the run goes on: verifier 0 s |",
    ]

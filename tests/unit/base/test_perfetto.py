"""A trace of concurrent spans nests, is complete, and survives cut lines."""

import asyncio
import json
from collections import defaultdict
from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.telemetry import spans
from goaly.base.telemetry.perfetto import FinishedSpan, lanes, merge, trace_events
from goaly.base.telemetry.spans import span


def finished(start: int, stop: int, *, task: int | None = 0, name: str = "work", **other) -> FinishedSpan:
    where = {"process": "worker", "pid": 11, "track": "MainThread", "thread": 1, "args": {}} | other
    return FinishedSpan(name=name, start_ns=start, stop_ns=stop, task=task, **where)


def apart_or_nested(a: tuple[int, int], b: tuple[int, int]) -> bool:
    apart = a[1] <= b[0] or b[1] <= a[0]
    return apart or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])


@st.composite
def tasks_spans(draw: st.DrawFn) -> list[FinishedSpan]:
    """Spans of several tasks; those of a task nest, as `with` blocks do, inner ones recorded first."""
    found: list[FinishedSpan] = []
    for task in range(draw(st.integers(1, 4))):
        edges = sorted(draw(st.lists(st.integers(0, 60), min_size=2, max_size=10)))
        open_at: list[int] = []
        for index, edge in enumerate(edges):
            left = len(edges) - index
            if open_at and (len(open_at) >= left or draw(st.booleans())):
                found.append(finished(open_at.pop(), edge, task=task))
            else:
                open_at.append(edge)
    return found


@settings(deadline=None)
@given(tasks_spans())
def test_on_a_lane_spans_are_apart_or_nested_and_overlapping_ones_share_their_task(found: list[FinishedSpan]):
    placed = lanes(found)
    assert sorted((span.start_ns, span.stop_ns, span.task) for _, span in placed) == sorted(
        (span.start_ns, span.stop_ns, span.task) for span in found
    )
    for (lane, one), (other_lane, other) in combinations(placed, 2):
        if lane == other_lane:
            pair = (one.start_ns, one.stop_ns), (other.start_ns, other.stop_ns)
            assert apart_or_nested(*pair)
            overlap = min(pair[0][1], pair[1][1]) - max(pair[0][0], pair[1][0])
            assert overlap <= 0 or one.task == other.task
    assert 1 + max((lane for lane, _ in placed), default=-1) <= len({span.task for span in found})


@settings(deadline=None)
@given(st.lists(st.builds(finished, st.integers(0, 40), st.integers(0, 40), task=st.none() | st.integers(0, 2))))
def test_even_spans_that_make_no_sense_are_placed_without_crossing(found: list[FinishedSpan]):
    placed = lanes(found)
    assert len(placed) == len(found)
    for (lane, one), (other_lane, other) in combinations(placed, 2):
        if lane == other_lane:
            assert apart_or_nested(
                (one.start_ns, max(one.start_ns, one.stop_ns)), (other.start_ns, max(other.start_ns, other.stop_ns))
            )


def test_two_tasks_take_turns_on_two_lanes_and_a_lane_is_used_again():
    outer, inner = finished(0, 100, task=1, name="outer"), finished(10, 20, task=1, name="inner")
    overlapping, later = finished(50, 150, task=2, name="overlapping"), finished(100, 120, task=3, name="later")
    assert [(lane, span.name) for lane, span in lanes([inner, outer, overlapping, later])] == [
        (0, "outer"),
        (0, "inner"),
        (1, "overlapping"),
        (0, "later"),
    ]


def test_recorded_waits_never_nest_in_each_other():
    placed = lanes([finished(0, 100, task=None), finished(10, 20, task=None)])
    assert [lane for lane, _ in placed] == [0, 1]


def test_events_are_whole_microseconds_from_the_first_span_and_name_processes_and_lanes():
    events = list(
        trace_events(
            [
                finished(5_000_999, 5_010_000, process="trainer", pid=7, name="train"),
                finished(5_000_000, 5_001_500, process="generator-0", pid=8, name="apply", track="engine"),
            ]
        )
    )
    assert [(e["args"]["name"], e["pid"], e["tid"]) for e in events if e["name"].endswith("_name")] == [
        ("generator-0", 1, 0),
        ("engine", 1, 1),
        ("trainer", 2, 0),
        ("MainThread", 2, 1),
    ]
    spans_only = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans_only == [("apply", 1, 1, 0, 1), ("train", 2, 1, 0, 10)]


def test_a_process_that_was_replaced_appears_as_two():
    events = trace_events([finished(0, 1, pid=7), finished(2, 3, pid=9)])
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["worker (pid 7)", "worker (pid 9)"]


def test_a_real_run_of_concurrent_tasks_becomes_a_trace_that_nests(tmp_path: Path):
    async def episode(index: int, turns: list[asyncio.Event]) -> None:
        with span("generation", sample=index):
            await turns[index].wait()
            with span("reward"):
                await asyncio.sleep(0)
            turns[(index + 3) % 8].set()

    async def run() -> None:
        turns = [asyncio.Event() for _ in range(8)]
        turns[0].set()
        async with asyncio.TaskGroup() as group:
            for index in range(8):
                group.create_task(episode(index, turns))

    spans.configure(tmp_path, "rollout-0")
    asyncio.run(run())
    spans.configure(None, "rollout-0")
    file = tmp_path / "spans" / "rollout-0.jsonl"
    with file.open("a") as cut:
        cut.write('{"pid":1,"name":"ha')
    assert merge(tmp_path) == tmp_path / "trace.json"
    trace = json.loads((tmp_path / "trace.json").read_text())
    drawn = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            drawn[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, drawn.values())) == 16
    assert len(drawn) == 8
    assert all(apart_or_nested(*pair) for lane in drawn.values() for pair in combinations(lane, 2))


def test_a_run_without_spans_has_an_empty_trace(tmp_path: Path):
    assert merge(tmp_path) is not None
    assert json.loads((tmp_path / "trace.json").read_text()) == {"displayTimeUnit": "ms", "traceEvents": []}


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog):
    assert merge(tmp_path / "gone") is None
    assert "could not be written" in caplog.text

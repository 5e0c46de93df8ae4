"""Merges the span files of a run's processes into `trace.json`, which Perfetto and chrome://tracing open.

Both draw the spans of a thread as a stack, so these must nest. Spans of concurrent asyncio tasks do not nest: each task
gets its own lane while its outermost span lasts, and the lanes of a thread appear as threads `MainThread`,
`MainThread 2`, …

Two spans on one lane are either disjoint or nested, and nested spans belong to the same task. Every complete span is in
the trace; spans that a crash left half-written are skipped.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from goaly.base.json_text import read_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSpan:
    """One span as a process recorded it. `task` is None for an interval from `record`, in which no span nests."""

    name: str
    process: str
    pid: int
    track: str
    thread: int
    task: int | None
    start_ns: int
    stop_ns: int
    args: dict[str, Any]


def merge(run_dir: str | Path) -> Path | None:
    """Write the run's `trace.json` from its span files; None, with a warning, if that fails."""
    path = Path(run_dir) / "trace.json"
    unfinished = path.with_suffix(".json.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for index, event in enumerate(trace_events(read_spans(run_dir))):
                file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return None
    return path


def read_spans(run_dir: str | Path) -> Iterator[FinishedSpan]:
    """The spans of all processes of a run, file by file."""
    for path in sorted((Path(run_dir) / "spans").glob("*.jsonl")):
        for line in read_lines(path):
            try:
                yield FinishedSpan(process=path.stem, **line)
            except TypeError:
                continue  # two processes' lines may have met where one was cut


def trace_events(spans: Iterable[FinishedSpan]) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace: names of processes and lanes, and a complete ("X") event for each span, in µs."""
    tracks: dict[tuple[str, int], dict[tuple[str, int], list[FinishedSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        tracks[span.process, span.pid][span.track, span.thread].append(span)
    every = [span.start_ns for threads in tracks.values() for found in threads.values() for span in found]
    origin_ns = min(every, default=0)
    for pid, (process, threads) in enumerate(sorted(tracks.items()), start=1):
        restarted = sum(name == process[0] for name, _ in tracks) > 1
        name = f"{process[0]} (pid {process[1]})" if restarted else process[0]
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
        first_lane = 1
        for (track, _), found in sorted(threads.items(), key=lambda item: min(span.start_ns for span in item[1])):
            placed = lanes(found)
            for lane in range(1 + max(lane for lane, _ in placed)):
                tid = first_lane + lane
                yield _metadata("thread_name", pid, tid, {"name": f"{track} {lane + 1}" if lane else track})
                yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})
            for lane, span in placed:
                start = _microseconds(span.start_ns - origin_ns)
                yield {
                    "name": span.name,
                    "cat": span.name,
                    "ph": "X",
                    "pid": pid,
                    "tid": first_lane + lane,
                    "ts": start,
                    "dur": _microseconds(max(span.stop_ns, span.start_ns) - origin_ns) - start,
                    "args": span.args,
                }
            first_lane += 1 + max(lane for lane, _ in placed)


def lanes(spans: list[FinishedSpan]) -> list[tuple[int, FinishedSpan]]:
    """A lane for every span of a thread, outer spans before inner ones; no more lanes than concurrent tasks."""
    # Of two spans with the same extent, the one recorded last is the outer one.
    order = sorted(enumerate(spans), key=lambda item: (item[1].start_ns, -item[1].stop_ns, -item[0]))
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    opened: dict[int, list[tuple[int, int]]] = {}
    count = 0
    placed = []
    for _, span in order:
        stop_ns = max(span.stop_ns, span.start_ns)
        while busy and busy[0][0] <= span.start_ns:
            heappush(free, heappop(busy)[1])
        stack = opened.get(span.task, []) if span.task is not None else []
        while stack and stack[-1][0] <= span.start_ns:
            stack.pop()
        if stack and stop_ns <= stack[-1][0]:
            lane = stack[-1][1]
        else:
            stack = []
            lane = heappop(free) if free else count
            count = max(count, lane + 1)
            heappush(busy, (stop_ns, lane))
        if span.task is not None:
            opened[span.task] = [*stack, (stop_ns, lane)]
        placed.append((lane, span))
    return placed


def _microseconds(nanoseconds: int) -> int:
    # Integers, rounded down at both ends of a span: spans that nest in ns also nest in µs.
    return nanoseconds // 1000


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}

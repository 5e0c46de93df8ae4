"""Spans: named time intervals in every process of a run, on one clock.

`configure` opens this process's file, `<run_dir>/spans/<process>.jsonl`; before that (and after `configure(None, …)`)
a span costs some hundred nanoseconds and records nothing. `base/telemetry/perfetto.py` merges the files into one trace.

    with span("pull", version=3) as pull:
        …
        pull.note(bytes=copied)

The clock is `time.time_ns()`, which all processes of a host share. Spans are written a few hundred at a time, or with
the first one that ends a second after the last write, so a killed process loses about a second. `span` is safe in
threads and asyncio tasks. A forked child records no spans.
"""

import asyncio
import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any

from goaly.base.json_text import LineFile

BUFFERED_SPANS = 256
FLUSH_NANOSECONDS = 1_000_000_000


class Span:
    """One time interval, recorded when it ends if this process records spans."""

    __slots__ = ("_args", "_name", "_recorder", "_start")

    def __init__(self, recorder: "_Recorder | None", name: str, args: dict[str, Any]):
        self._recorder = recorder
        self._name = name
        self._args = args

    def __enter__(self) -> "Span":
        self._start = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._recorder is None:
            return
        if kind is not None:
            self._args["error"] = kind.__name__
        thread = threading.current_thread()
        self._recorder.add(self._name, self._start, time.time_ns(), thread.name, thread.ident, _task(), self._args)

    def note(self, **args: Any) -> None:
        """Add arguments to the span."""
        self._args.update(args)


class _Recorder:
    """Buffers finished spans and writes them to this process's file."""

    def __init__(self, run_dir: Path, process: str):
        self.file = LineFile(run_dir / "spans" / f"{process}.jsonl")
        self._pid = os.getpid()
        self._buffer: list[tuple[Any, ...]] = []
        self._flushed_at = time.time_ns()
        self._lock = threading.Lock()

    def add(self, *finished: Any) -> None:
        """Keep `(name, start_ns, stop_ns, track, thread, task, args)`; write when it is time."""
        self._buffer.append(finished)
        if len(self._buffer) >= BUFFERED_SPANS or finished[2] - self._flushed_at > FLUSH_NANOSECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered spans."""
        with self._lock:
            self._flushed_at = time.time_ns()
            count = len(self._buffer)
            finished, self._buffer[:count] = self._buffer[:count], []
            keys = ("name", "start_ns", "stop_ns", "track", "thread", "task", "args")
            self.file.write(*({"pid": self._pid, **dict(zip(keys, one, strict=True))} for one in finished))


_recorder: _Recorder | None = None


def configure(run_dir: str | Path | None, process: str) -> None:
    """Record this process's spans under `run_dir` from now on as those of `process`; None stops recording."""
    global _recorder
    previous, _recorder = _recorder, None
    if previous is not None:
        previous.flush()
        previous.file.close()
    if run_dir is not None:
        _recorder = _Recorder(Path(run_dir), process)


def span(name: str, **args: Any) -> Span:
    """A context manager that records how long its body took, with these arguments (numbers, strings)."""
    return Span(_recorder, name, args)


def record(name: str, start_ns: int, stop_ns: int, **args: Any) -> None:
    """Record an interval that began and ended in different places, such as a wait in a queue, on its own track."""
    recorder = _recorder
    if recorder is not None:
        recorder.add(name, start_ns, stop_ns, name, 0, None, args)


def flush() -> None:
    """Write the buffered spans; actors call it when they close."""
    recorder = _recorder
    if recorder is not None:
        recorder.flush()


def _task() -> int:
    """The id of the running asyncio task; 0 outside of one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else id(task)


def _forget() -> None:
    global _recorder
    _recorder = None


atexit.register(flush)
os.register_at_fork(after_in_child=_forget)

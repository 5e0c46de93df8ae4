"""The thread that owns an engine: take commands, step, hand ended samples back to the event loop.

Invariants
    LO-1  Only this thread touches the engine once it runs.
    LO-2  Every submitted request ends once: with a sample, with an error that is its own fault, or, after `stop`, with
          `ReplicaLost`.
    LO-3  The thread sleeps on a condition while there is nothing to do.
    LO-4  An engine that breaks, or a link to the other ranks that does, ends the process at once (PR-1), on every rank.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from goaly.errors import ReplicaLost
from goaly.generate.commands import Add, Apply, Cancel, Command, Sequencer, Stop
from goaly.generate.ranks import Link
from goaly.generate.request import Finish, GeneratorStats, Sample, Sampling
from goaly.process import give_up

Ended = list[tuple[str, Sample | Exception]]
Deliver = Callable[[str, Sample | Exception], None]
"""Takes what became of a request, in the event loop."""


class SteppingEngine(Protocol):
    """What the thread needs of an engine; `check` is called in the event loop."""

    @property
    def under_way(self) -> int: ...
    @property
    def version(self) -> int: ...
    def enter_thread(self) -> None: ...
    def counts(self) -> tuple[int, int]: ...
    def check(self, name: str, prompt: list[int]) -> None: ...
    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None: ...
    def cancel(self, names: list[str]) -> list[tuple[str, Sample]]: ...
    def step(self) -> list[tuple[str, Sample]]: ...
    def apply(self, fill: Callable[[], int]) -> int: ...


class EngineLoop:
    """Steps an engine in a thread of its own; made and used in the event loop that it delivers to."""

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        apply_mode: str,
        max_running: int,
        fill: Callable[[], int],
        link: Link | None = None,
    ):
        """`fill` overwrites this rank's weights with those held ready. With a `link`, ranks above 0 only follow."""
        self._engine = engine
        self._fill = fill
        self._link = link
        self._follows = link is not None and link.rank > 0
        self._sequencer = Sequencer(apply_mode, max_running=max_running)
        self._work = threading.Condition()
        self._events = asyncio.get_running_loop()
        self._under_way: dict[str, Deliver] = {}
        self._version = engine.version
        self._version_changed = asyncio.Event()
        self._closed: ReplicaLost | None = None
        self._tokens = 0
        self._steps = 0
        self._updates = 0
        self._busy_seconds = 0.0
        self._stall_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version that decodes, as known in the event loop."""
        return self._version

    def submit(self, name: str, prompt: list[int], sampling: Sampling, min_version: int, deliver: Deliver) -> None:
        """Take a request up; `deliver` is called once, with its sample or its error."""
        if self._closed is not None:
            deliver(name, self._closed)
            return
        if name in self._under_way:
            error = ValueError(f"request_id={name!r}: a request of that id is under way here; ids must be unique")
            deliver(name, error)
            return
        try:
            self._engine.check(name, prompt)
        except ValueError as error:
            deliver(name, error)
            return
        self._under_way[name] = deliver
        self._ask(Add(name, prompt, sampling, min_version))

    async def generate(self, name: str, prompt: list[int], sampling: Sampling, *, min_version: int = 0) -> Sample:
        """The sample of this request; cancelling the call cancels the request."""
        future: asyncio.Future[Sample] = self._events.create_future()

        def deliver(_: str, result: Sample | Exception) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.submit(name, prompt, sampling, min_version, deliver)
        try:
            return await future  # a step, a cancel or `stop` unblocks it (LO-2)
        except asyncio.CancelledError:
            self.cancel([name])
            raise

    def cancel(self, names: list[str]) -> None:
        """End these requests, with what was sampled so far."""
        self._ask(Cancel(tuple(names)))

    async def apply(self, version: int) -> None:
        """Have the weights held ready applied between two steps; returns when that version decodes."""
        self._ask(Apply(version))
        await self.version_at_least(version)

    async def version_at_least(self, version: int) -> int:
        """Wait until the engine decodes with at least this version; the version it has then."""
        while self._version < version:
            if self._closed is not None:
                raise self._closed
            await self._version_changed.wait()  # each apply, and `stop`, sets it
        return self._version

    async def stop(self) -> None:
        """End the thread; requests still under way fail."""
        self._ask(Stop())
        if not self._follows:  # a follower's thread ends when rank 0 tells it to
            await asyncio.to_thread(self._thread.join)

    def stats(self) -> GeneratorStats:
        """Counts since the start."""
        running, waiting = self._engine.counts()
        return GeneratorStats(
            version=self._version,
            running=running,
            waiting=waiting + self._sequencer.waiting,
            tokens=self._tokens,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            updates=self._updates,
            stall_seconds=self._stall_seconds,
        )

    def _ask(self, command: Command) -> None:
        with self._work:
            self._sequencer.ask(command)
            self._work.notify()

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            while self._round():
                pass
        except BaseException as error:
            give_up("the engine's thread broke", error)  # LO-4
        self._post(self._close)

    def _round(self) -> bool:
        """Commands, then a step; False once told to stop."""
        commands = self._link.receive() if self._follows and self._link is not None else self._lead()
        for command in commands:
            match command:
                case Stop():
                    return False
                case Apply():
                    self._apply()
                case Add(name, prompt, sampling):
                    try:
                        self._engine.add(name, prompt, sampling)
                    except ValueError as error:  # the request's own fault: it fails alone
                        self._post(self._end, [(name, error)])
                case Cancel(names):
                    self._post(self._end, self._engine.cancel(list(names)))
        if self._engine.under_way:
            started = time.perf_counter()
            ended = self._engine.step()
            self._busy_seconds += time.perf_counter() - started
            self._steps += 1
            if ended:
                self._tokens += sum(len(sample.tokens) for _, sample in ended)
                self._post(self._end, ended)
        return True

    def _lead(self) -> list[Command]:
        with self._work:
            self._work.wait_for(lambda: self._sequencer.ready(self._engine.under_way))  # LO-3: `_ask` notifies
            commands, never_begun = self._sequencer.next(self._engine.under_way)
        if self._link is not None:
            self._link.send(commands)
        if never_begun:
            self._post(self._end, [(name, _nothing()) for name in never_begun])
        return commands

    def _apply(self) -> None:
        started = time.perf_counter()
        version = self._engine.apply(self._fill)
        self._stall_seconds += time.perf_counter() - started
        self._updates += 1
        self._post(self._turn, version)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        self._events.call_soon_threadsafe(callback, *arguments)

    def _end(self, ended: Ended) -> None:
        for name, result in ended:
            deliver = self._under_way.pop(name, None)
            if deliver is not None:
                deliver(name, result)

    def _turn(self, version: int) -> None:
        self._version = version
        self._wake_version_waiters()

    def _close(self) -> None:
        self._closed = ReplicaLost("the generator was closed")
        under_way, self._under_way = self._under_way, {}
        for name, deliver in under_way.items():
            deliver(name, self._closed)
        self._wake_version_waiters()

    def _wake_version_waiters(self) -> None:
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()


def _nothing() -> Sample:
    return Sample(
        tokens=torch.empty(0, dtype=torch.int64),
        logprobs=torch.empty(0, dtype=torch.float32),
        versions=torch.empty(0, dtype=torch.int32),
        finish=Finish.CANCELLED,
    )

"""The thread that owns an engine. It takes commands, steps the engine, and returns samples to the event loop.

The tensor-parallel ranks of a replica each run this loop: rank 0 decides, and sends each round to the others by a
`Link`.

Only the thread touches the engine once it runs. It sleeps on a condition while there is nothing to do; the other ranks
block in a receive.

Invariants
    LO-1  Every rank's engine gets the same commands in the same order: rank 0 broadcasts a round before it acts on it.
    LO-2  Every submitted request ends once: with a sample, with its own error, or, after `stop`, with `ReplicaLost`.
    LO-3  A failure of the engine, or of a link between ranks, ends the process at once (PR-1), on every rank.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from goaly.errors import ReplicaLost
from goaly.generate.request import Finish, GeneratorStats, Sample, Sampling, duplicate_request
from goaly.generate.scheduler import Add, Apply, Cancel, Command, Scheduler, Stop
from goaly.process import give_up

Deliver = Callable[[str, Sample | Exception], None]
"""Takes a request's sample or its error, in the event loop."""

NO_TIMEOUT = timedelta(days=3650)
"""An idle replica waits for hours. When a peer dies, the closed connection ends the wait, or the service does: it kills
every rank of a replica that lost one (GS-2)."""


class Link:
    """An ordered channel from rank 0 to the other ranks over gloo, and a vote of all ranks. On each rank, one thread
    uses it."""

    def __init__(self) -> None:
        """Collective: all ranks make their links in the same order, after torch.distributed is initialized."""
        self._group: Any = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self.rank = dist.get_rank()

    def send(self, message: Any) -> None:
        """Rank 0: send a message to every other rank."""
        dist.broadcast_object_list([message], src=0, group=self._group)

    def receive(self) -> Any:
        """Other ranks: the next message; blocks until rank 0 sends one or dies."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def all_agree(self, yes: bool) -> bool:
        """All ranks: whether every one of them said yes."""
        vote = torch.tensor([int(yes)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())


class SteppingEngine(Protocol):
    """The methods of an engine that the thread calls. `check` is called in the event loop."""

    @property
    def running(self) -> int: ...
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
    """Steps an engine in a thread of its own. Made and used in the event loop that gets the samples."""

    def __init__(
        self,
        engine: SteppingEngine,
        *,
        on_update: str,
        max_running: int,
        fill: Callable[[], int],
        link: Link | None = None,
    ):
        """`fill` overwrites this rank's weights with the prefetched ones. With a `link`, ranks above 0 follow rank
        0."""
        self._engine = engine
        self._fill = fill
        self._link = link
        self._follows = link is not None and link.rank > 0
        self._scheduler = Scheduler(on_update, max_running=max_running)
        self._work = threading.Condition()
        self._events = asyncio.get_running_loop()
        self._requests: dict[str, Deliver] = {}
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
        """The version of the weights that decode, as the event loop knows it."""
        return self._version

    def submit(self, name: str, prompt: list[int], sampling: Sampling, min_version: int, deliver: Deliver) -> None:
        """Start a request. `deliver` is called once, with its sample or its error."""
        if self._closed is not None:
            deliver(name, self._closed)
            return
        if name in self._requests:
            deliver(name, duplicate_request(name))
            return
        try:
            self._engine.check(name, prompt)
        except ValueError as error:
            deliver(name, error)
            return
        self._requests[name] = deliver
        self._command(Add(name, prompt, sampling, min_version))

    async def generate(self, name: str, prompt: list[int], sampling: Sampling, *, min_version: int = 0) -> Sample:
        """The sample of this request. Cancelling the call cancels the request."""
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
        """End these requests with the tokens sampled so far."""
        self._command(Cancel(tuple(names)))

    async def apply(self, version: int) -> None:
        """Apply the prefetched weights between two steps; returns when that version decodes."""
        self._command(Apply(version))
        await self.version_at_least(version)

    async def version_at_least(self, version: int) -> int:
        """Wait until the engine decodes with at least this version; the version it has then."""
        while self._version < version:
            if self._closed is not None:
                raise self._closed
            await self._version_changed.wait()  # each apply, and `stop`, sets it
        return self._version

    async def stop(self) -> None:
        """End the thread; running requests fail."""
        self._command(Stop())
        if not self._follows:  # the others' threads end when rank 0 tells them to
            await asyncio.to_thread(self._thread.join)

    def stats(self) -> GeneratorStats:
        """Counts since the start."""
        running, waiting = self._engine.counts()
        return GeneratorStats(
            version=self._version,
            running=running,
            waiting=waiting + self._scheduler.waiting,
            tokens=self._tokens,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            updates=self._updates,
            stall_seconds=self._stall_seconds,
        )

    def _command(self, command: Command) -> None:
        with self._work:
            self._scheduler.submit(command)
            self._work.notify()

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            while self._round():
                pass
        except BaseException as error:
            give_up("the engine's thread failed", error)  # LO-3
        self._post(self._close)

    def _round(self) -> bool:
        """Run a round's commands, then a step; False after a stop."""
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
                    except ValueError as error:  # the request's own error: it fails alone
                        self._post(self._end, [(name, error)])
                case Cancel(names):
                    self._post(self._end, self._engine.cancel(list(names)))
        if self._engine.running:
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
            self._work.wait_for(lambda: self._scheduler.has_work(self._engine.running))  # `_command` notifies
            commands, never_started = self._scheduler.next(self._engine.running)
        if self._link is not None:
            self._link.send(commands)  # LO-1
        if never_started:
            self._post(self._end, [(name, _empty_sample()) for name in never_started])
        return commands

    def _apply(self) -> None:
        started = time.perf_counter()
        version = self._engine.apply(self._fill)
        self._stall_seconds += time.perf_counter() - started
        self._updates += 1
        self._post(self._applied, version)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        self._events.call_soon_threadsafe(callback, *arguments)

    def _end(self, results: list[tuple[str, Sample | Exception]]) -> None:
        for name, result in results:
            deliver = self._requests.pop(name, None)
            if deliver is not None:
                deliver(name, result)

    def _applied(self, version: int) -> None:
        self._version = version
        self._wake_version_waiters()

    def _close(self) -> None:
        self._closed = ReplicaLost("the generator was closed")
        requests, self._requests = self._requests, {}
        for name, deliver in requests.items():
            deliver(name, self._closed)
        self._wake_version_waiters()

    def _wake_version_waiters(self) -> None:
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()


def _empty_sample() -> Sample:
    return Sample(
        tokens=torch.empty(0, dtype=torch.int64),
        logprobs=torch.empty(0, dtype=torch.float32),
        versions=torch.empty(0, dtype=torch.int32),
        finish=Finish.CANCELLED,
    )

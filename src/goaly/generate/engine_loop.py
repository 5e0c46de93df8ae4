"""The thread that owns an engine: takes commands, steps the engine, and delivers samples.

The tensor-parallel ranks of a replica each run this loop: rank 0 decides (`Scheduler`), and sends each round to the
others by a `RankLink`. Only the thread touches the engine once it runs.

Every request ends once, after `stop` with `ReplicaLost` (generate-1). A failure of the engine or of a link between
ranks ends the process (base-1), and so does a round that makes no progress (base-4); waiting for commands has no
time limit.

    generate-6: Every rank's engine gets the same commands in the same order: rank 0 broadcasts a round before it acts
        on it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from goaly.base.errors import ReplicaLost
from goaly.base.inflight_limit import InflightLimit, MeasuredLoad
from goaly.base.process import give_up
from goaly.base.watchdog import Work
from goaly.generate.request import (
    Finish,
    GeneratorStats,
    InvalidRequest,
    Request,
    Sample,
    Sampling,
    duplicate_request,
    settle,
)
from goaly.generate.scheduler import Apply, Cancel, Command, Scheduler, Stop
from goaly.generate.settings import GeneratorSettings
from goaly.generate.streamed_answer import OnPart
from goaly.generate.versioned_tokens import VersionedTokens
from goaly.weights.digest import gathered

if TYPE_CHECKING:
    from goaly.generate.vllm_engine import VllmEngine

Result = VersionedTokens | Sample | Exception
"""A part of a streamed answer, a whole answer, or a request's error."""

Deliver = Callable[[str, Result], None]
"""Takes a request's parts, if it is streamed, and then its sample or its error. The engine's thread calls it; after its
end the event loop does, with the errors of running requests."""

NO_TIMEOUT = timedelta(days=3650)
"""An idle replica waits for hours. When a peer dies, the closed connection ends the wait, or the service does: it kills
every rank of a replica that lost one (generate-11). A peer that is stuck in its work ends itself."""


MOST_PARTS = 4000
"""Most parts a second, of all streamed requests together: about the limit of an endpoint's event loop. Each of 100
streams gets a part 40 times a second, with the tokens of all steps since the last one."""


class RankLink:
    """An ordered channel from rank 0 to the other ranks over gloo, and votes and messages of all ranks. On each rank,
    one thread uses it."""

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

    def gathered(self, message: Any) -> list[Any]:
        """All ranks: the messages of all of them."""
        return gathered(message, self._group)


class EngineLoop:
    """Steps an engine in a thread of its own. Made and used in an event loop."""

    def __init__(
        self,
        engine: "VllmEngine",
        settings: GeneratorSettings,
        fill: Callable[[], int],
        link: RankLink | None = None,
        delivered: Callable[[], None] = lambda: None,
    ):
        """`fill` overwrites this rank's weights with the prefetched ones. With a `link`, ranks above 0 follow rank 0.
        `delivered` is called after the deliveries of a round."""
        self._engine = engine
        self._fill = fill
        self._link = link
        self._delivered = delivered
        self._follows = link is not None and link.rank > 0
        self._limit = None
        most = settings.most_running
        if settings.max_running == "auto":
            fits = engine.cache_tokens // settings.max_context
            self._limit = InflightLimit(start=fits, least=max(1, fits), most=most)
            most = self._limit.value
        self._scheduler = Scheduler(settings.on_update, max_running=most, version=engine.version)
        self._work = threading.Condition()
        self._events = asyncio.get_running_loop()
        self._requests: dict[str, Deliver] = {}
        self.version = engine.version
        """The version of the weights that decode, as the event loop knows it."""
        self._version_changed = asyncio.Event()
        self._closed: ReplicaLost | None = None
        self._stats = GeneratorStats()
        self._next_parts = 0.0
        """When the next parts may be sent."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> Collection[str]:
        """The names of the requests that have not ended."""
        return tuple(self._requests)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Start a request. `deliver` is called once, with its sample or its error, and before that with the parts of a
        streamed one. ReplicaLost after the end, ValueError if no engine can continue the prompt: then it is not."""
        name = request.request_id
        if self._closed is not None:
            raise self._closed
        if name in self._requests:
            raise duplicate_request(name)
        self._engine.check(name, request.prompt)
        self._requests[name] = deliver
        self._command(request)

    async def generate(
        self,
        name: str,
        prompt: list[int],
        sampling: Sampling,
        min_version: int = 0,
        session: str | None = None,
        on_part: OnPart | None = None,
        begun_at: int | None = None,
    ) -> Sample:
        """The sample of this request; `on_part` gets its parts before. Cancelling the call cancels the request. A
        `session` has no effect at a single engine."""
        future: asyncio.Future[Sample] = self._events.create_future()

        def deliver(_: str, result: Result) -> None:
            self._events.call_soon_threadsafe(take, result)

        def take(result: Result) -> None:
            if not isinstance(result, VersionedTokens):
                settle(future, result)
            elif on_part is not None:
                on_part(result)

        request = Request(name, prompt, sampling, min_version, on_part is not None, begun_at=begun_at)
        self.submit(request, deliver)
        try:
            return await future  # a step, a cancel or `stop` unblocks it (generate-1)
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
        while self.version < version:
            if self._closed is not None:
                raise self._closed
            await self._version_changed.wait()  # each apply, and `stop`, sets it
        return self.version

    async def stop(self) -> None:
        """End the thread; running requests fail."""
        self._command(Stop())
        if not self._follows:  # the others' threads end when rank 0 tells them to
            await asyncio.to_thread(self._thread.join)

    def stats(self) -> GeneratorStats:
        """Counts since the start."""
        running, waiting = self._engine.counts()
        cache_use, preemptions = self._engine.cache_load
        return replace(
            self._stats,
            version=self.version,
            running=running,
            waiting=waiting + self._scheduler.waiting,
            queued=waiting + self._scheduler.queued,
            max_running=self._scheduler.max_running,
            cache_use=cache_use,
            preemptions=preemptions,
        )

    def _command(self, command: Command) -> None:
        with self._work:
            self._scheduler.submit(command)
            self._work.notify()

    def _run(self) -> None:
        try:
            self._engine.enter_thread()
            goes_on = True
            while goes_on:
                commands = self._link.receive() if self._follows and self._link is not None else self._lead()
                with Work("the engine"):
                    goes_on = self._execute(commands)
        except BaseException as error:
            give_up("the engine's thread failed", error)
        self._events.call_soon_threadsafe(self._close)

    def _execute(self, commands: list[Command]) -> bool:
        """Run the commands, then a step if requests are running; False after a stop."""
        for command in commands:
            match command:
                case Stop():
                    return False
                case Apply():
                    self._apply()
                case Request(name, prompt, sampling, _, streams, written, begun_at):
                    try:
                        streams = streams and not self._follows  # rank 0 sends
                        self._engine.add(name, prompt, sampling, streams=streams, written=written, begun_at=begun_at)
                    except ValueError as error:  # the request's own error: it fails alone
                        refused = error if isinstance(error, InvalidRequest) else InvalidRequest(str(error))
                        self._deliver([(name, refused)])  # vLLM's own could not be built again by the client
                case Cancel(names):
                    self._deliver(self._engine.cancel(list(names)))
        if running := self._engine.running:
            started = time.perf_counter()
            ended = self._engine.step()
            now = time.perf_counter()
            self._measure(running, now - started, sum(isinstance(result, Sample) for _, result in ended))
            if ended:
                self._stats.tokens += sum(len(sample.tokens) for _, sample in ended if isinstance(sample, Sample))
            if results := [*self._parts(now), *ended]:
                self._deliver(results)
        return True

    def _measure(self, running: int, seconds: float, ended: int) -> None:
        """Count a step of so many requests, of which some ended; the limit of running requests follows."""
        stats = self._stats
        cache_use, preemptions = self._engine.cache_load
        stats.busy_seconds += seconds
        stats.running_seconds += seconds * running
        stats.cache_seconds += seconds * cache_use
        stats.steps += 1
        if self._limit is not None and not self._follows:
            more = preemptions - stats.preemptions
            held = self._scheduler.holds_back
            load = MeasuredLoad(under_way=running, holds_back=held, cache_use=cache_use, preemptions=more, ended=ended)
            self._limit.observe(load)
            self._scheduler.max_running = self._limit.value
        stats.preemptions = preemptions

    def _parts(self, now: float) -> list[tuple[str, VersionedTokens]]:
        streams = self._engine.streams
        if not streams or now < self._next_parts:
            return []
        self._next_parts = now + streams / MOST_PARTS
        return self._engine.parts()

    def _lead(self) -> list[Command]:
        with self._work:
            self._work.wait_for(lambda: self._scheduler.has_work(self._engine.running))  # `_command` notifies
            commands, never_started = self._scheduler.next(self._engine.running)
        if self._link is not None:
            with Work("sending commands"):  # to a rank that may not receive them
                self._link.send(commands)  # generate-6
        if never_started:
            self._deliver([(name, Sample.of([], [], [], Finish.CANCELLED)) for name in never_started])
        return commands

    def _apply(self) -> None:
        started = time.perf_counter()
        version = self._engine.apply(self._fill)
        self._stats.stall_seconds += time.perf_counter() - started
        self._stats.updates += 1
        self._events.call_soon_threadsafe(self._applied, version)

    def _deliver(self, results: Sequence[tuple[str, Result]]) -> None:
        for name, result in results:
            find = self._requests.get if isinstance(result, VersionedTokens) else self._requests.pop
            deliver = find(name, None)
            if deliver is not None:
                deliver(name, result)
        self._delivered()

    def _applied(self, version: int) -> None:
        self.version = version
        self._wake_version_waiters()

    def _close(self) -> None:
        self._closed = ReplicaLost("the generator was closed")
        requests, self._requests = self._requests, {}
        for name, deliver in requests.items():
            deliver(name, self._closed)
        self._delivered()
        self._wake_version_waiters()

    def _wake_version_waiters(self) -> None:
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()

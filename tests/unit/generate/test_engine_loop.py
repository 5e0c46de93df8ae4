"""The engine's thread, with an engine that needs no model: requests take one step a token, weights are a number."""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from goaly.base import watchdog
from goaly.base.errors import ReplicaLost
from goaly.base.watchdog import WorkWatchdog
from goaly.generate.engine_loop import EngineLoop
from goaly.generate.request import Finish, InvalidRequest, Request, Sample, Sampling
from goaly.generate.scheduler import Command, Stop
from goaly.generate.settings import GeneratorSettings
from goaly.generate.versioned_tokens import VersionedTokens

pytestmark = pytest.mark.timeout(20)

SETTINGS = GeneratorSettings(on_update="keep", max_running=1000)
ENDLESS = Sampling(max_tokens=10**9)


class CountingEngine:
    """Samples the token 7 until a request has its `max_tokens`; breaks when told to."""

    def __init__(self) -> None:
        self.version = 0
        self.breaks = False
        self.cache_tokens = 10**6
        self.preemptions = 0
        self.threads: list[str] = []
        self._written: dict[str, VersionedTokens] = {}
        self.begun_at: dict[str, int | None] = {}
        self._given: dict[str, int] = {}
        self._wanted: dict[str, int] = {}

    @property
    def running(self) -> int:
        return len(self._written)

    @property
    def cache_load(self) -> tuple[float, int]:
        used = sum(1 + len(written.tokens) for written in list(self._written.values()))
        return used / self.cache_tokens, self.preemptions

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def counts(self) -> tuple[int, int]:
        return len(self._written), 0

    def check(self, name: str, prompt: list[int]) -> None:
        if 99 in prompt:
            raise ValueError(f"request {name}: token id 99")

    def add(
        self, name: str, prompt: list[int], sampling: Sampling, *, streams: bool, written: int, begun_at: int | None
    ) -> None:
        if (sampling.top_p or 0) > 1:
            raise ValueError(f"request {name}: top_p={sampling.top_p}")
        self._written[name] = VersionedTokens()
        self._wanted[name] = sampling.max_tokens
        self.begun_at[name] = begun_at
        if streams:
            self._given[name] = 0

    @property
    def streams(self) -> int:
        return len(self._given.keys() & self._written.keys())

    def parts(self) -> list[tuple[str, VersionedTokens]]:
        parts = []
        for name in self._given.keys() & self._written.keys():
            parts.append((name, self._written[name].since(self._given[name])))
            self._given[name] = len(self._written[name].tokens)
        return parts

    def cancel(self, names: list[str]) -> list[tuple[str, Sample]]:
        return [(name, self._end(name, Finish.CANCELLED)) for name in names if name in self._written]

    def step(self) -> list[tuple[str, Sample]]:
        assert self.threads[-1:] == [threading.current_thread().name], "a step on a thread that was not entered"
        if self.breaks:
            raise RuntimeError("the cache caught fire")
        for written in self._written.values():
            written.stamp([7], [0.0], self.version)
        full = [name for name, written in self._written.items() if len(written.tokens) == self._wanted[name]]
        return [(name, self._end(name, Finish.LENGTH)) for name in full]

    def apply(self, fill: Callable[[], int]) -> int:
        self.version = fill()
        return self.version

    def _end(self, name: str, finish: Finish) -> Sample:
        written = self._written.pop(name)
        return Sample.of(written.tokens, written.logprobs, written.versions, finish)


@pytest.fixture
async def engine():
    return CountingEngine()


@pytest.fixture
async def loop(engine):
    weights = iter(range(1, 100))
    loop = EngineLoop(engine, SETTINGS, lambda: next(weights))
    yield loop
    await loop.stop()


def ask(loop: EngineLoop, name: str, max_tokens: int = 5, min_version: int = 0) -> asyncio.Task[Sample]:
    return asyncio.ensure_future(loop.generate(name, [1], Sampling(max_tokens=max_tokens), min_version=min_version))


async def test_many_requests_at_once_all_get_their_own_sample(loop):
    samples = await asyncio.gather(*(ask(loop, str(n), max_tokens=n) for n in range(1, 300)))
    assert [len(sample.tokens) for sample in samples] == list(range(1, 300))
    assert loop.stats().tokens == sum(range(1, 300))


async def test_an_engine_is_told_when_a_requests_conversation_began(loop):  # generate-4
    await loop.generate("new", [1], Sampling(max_tokens=1))
    await loop.generate("next", [1], Sampling(max_tokens=1), begun_at=4)
    assert loop._engine.begun_at == {"new": None, "next": 4}


async def test_the_parts_of_a_streamed_answer_come_while_it_is_sampled_and_none_after_its_end(loop):
    """generate-1"""
    parts: list[VersionedTokens] = []
    came = asyncio.Event()

    def take(part: VersionedTokens) -> None:
        parts.append(part)
        came.set()

    streamed = asyncio.ensure_future(loop.generate("streamed", [1], ENDLESS, on_part=take))
    await came.wait()
    assert not streamed.done()
    await loop.apply(1)
    await ask(loop, "beside it")
    while parts[-1].versions[-1] < 1:
        came.clear()
        await came.wait()
    loop.cancel(["streamed"])
    sample = await streamed
    await ask(loop, "after it")
    versions = [version for part in parts for version in part.versions]
    assert versions == sample.versions.tolist()[: len(versions)]
    assert set(versions) == {0, 1}


async def test_cancelling_ends_a_request_with_what_it_has_and_a_held_one_with_nothing(loop):
    running = asyncio.ensure_future(loop.generate("running", [1], ENDLESS, min_version=0))
    held = ask(loop, "held", min_version=9)
    await ask(loop, "meanwhile")
    loop.cancel(["running", "held", "unknown"])
    assert (await running).finish is Finish.CANCELLED
    assert len((await running).tokens) >= 5
    assert len((await held).tokens) == 0


async def test_giving_up_a_call_ends_its_request_in_the_engine(loop, engine):
    call = asyncio.ensure_future(loop.generate("given up", [1], ENDLESS, min_version=0))
    await ask(loop, "meanwhile")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await ask(loop, "after it")
    assert not engine.running


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "why"),
    [
        ([1], Sampling(max_tokens=1, top_p=3), InvalidRequest, "top_p=3"),  # some of vLLM's own do not unpickle
        ([1, 99], Sampling(max_tokens=1), ValueError, "token id 99"),
    ],
    ids=["by the engine", "before it"],
)
async def test_a_request_that_is_refused_fails_alone_and_its_name_is_free(loop, prompt, sampling, error, why):
    running = ask(loop, "sound", max_tokens=1000)
    for _ in range(2):
        with pytest.raises(error, match=why):
            await loop.generate("broken", prompt, sampling)
    assert len((await running).tokens) == 1000


@dataclass
class Broken:
    """A link to other ranks, whose connection is reset."""

    rank: int
    sent: list[list[Command]] = field(default_factory=list)

    def send(self, commands: list[Command]) -> None:
        self.sent.append(commands)
        raise ConnectionError("reset by peer")

    def receive(self) -> list[Command]:
        raise ConnectionError("reset by peer")


@pytest.mark.parametrize(
    ("link", "why"),
    [(None, "the cache caught fire"), (Broken(0), "reset by peer"), (Broken(1), "reset by peer")],
    ids=["its engine", "a leader's link", "a follower's link"],
)
async def test_a_rank_whose_engine_or_link_breaks_ends_its_process(engine, monkeypatch, link, why):
    events = asyncio.get_running_loop()
    ended: asyncio.Future[str] = events.create_future()

    def give_up(what: str, error: BaseException) -> None:
        events.call_soon_threadsafe(ended.set_result, f"{what}: {error}")

    monkeypatch.setattr("goaly.generate.engine_loop.give_up", give_up)
    engine.breaks = True
    loop = EngineLoop(engine, SETTINGS, lambda: 1, link)
    loop.submit(Request("one", [1], ENDLESS, 0), lambda name, result: None)
    assert await ended == f"the engine's thread failed: {why}"
    await asyncio.to_thread(loop._thread.join)


@dataclass
class Stuck:
    """A link to other ranks, and what the rank is working on while it uses it."""

    rank: int
    working: list[list[str]]
    sent: "queue.SimpleQueue[list[Command]]" = field(default_factory=queue.SimpleQueue)

    def send(self, commands: list[Command]) -> None:
        self.working.append(works())
        self.sent.put(commands)

    def receive(self) -> list[Command]:
        self.working.append(works())
        return self.sent.get()


def works() -> list[str]:
    """What the threads of this process are working on."""
    assert watchdog._watchdog is not None
    return [work.name for work in watchdog._watchdog.works.values()]


async def test_steps_and_messages_to_ranks_are_work_that_may_get_stuck_but_waiting_for_commands_is_not(
    engine, monkeypatch
):
    monkeypatch.setattr(watchdog, "_watchdog", WorkWatchdog(1000.0))
    step, stepping = engine.step, []

    def recorded():
        stepping.append(works())
        return step()

    monkeypatch.setattr(engine, "step", recorded)
    leader, follower = Stuck(0, []), Stuck(1, [])
    leads = EngineLoop(engine, SETTINGS, lambda: 1, leader)
    waits, has_work = [], leads._scheduler.has_work

    def looked(running: int) -> bool:
        waits.append(works())
        return has_work(running)

    monkeypatch.setattr(leads._scheduler, "has_work", looked)
    await ask(leads, "one", max_tokens=2)
    await leads.stop()
    assert {*map(tuple, leader.working)} == {("sending commands",)}
    follows = EngineLoop(engine, SETTINGS, lambda: 1, follower)
    follower.sent.put([Request("two", [1], Sampling(max_tokens=1), 0)])
    follower.sent.put([Stop()])
    await asyncio.to_thread(follows._thread.join)
    assert {*map(tuple, (*waits, *follower.working))} == {()}
    assert {*map(tuple, stepping)} == {("the engine",)}


async def test_closing_ends_what_is_still_running_with_an_error_that_says_so(engine):
    """generate-1"""
    loop = EngineLoop(engine, SETTINGS, lambda: 1)
    call = asyncio.ensure_future(loop.generate("endless", [1], ENDLESS, min_version=0))
    waiter = asyncio.ensure_future(loop.version_at_least(9))
    await asyncio.sleep(0)
    await loop.stop()
    for ended in (call, waiter, ask(loop, "after the end")):
        with pytest.raises(ReplicaLost, match="closed"):
            await ended


async def test_the_engine_prepares_the_thread_that_steps_it_before_the_first_call(engine, loop):
    """CUDA's current device is each thread's own: the engine was built in another thread than it is stepped in."""
    await ask(loop, "one")
    assert engine.threads == ["engine"]


async def test_the_limit_of_running_requests_follows_the_cache(engine):
    """It starts with as many as certainly fit, and short answers leave room for more."""
    engine.cache_tokens = 10_000
    settings = GeneratorSettings(on_update="keep", max_running="auto", max_context=1000, max_step_tokens=500)
    loop = EngineLoop(engine, settings, lambda: 1)
    try:
        assert loop.stats().max_running == 10
        await asyncio.gather(*(ask(loop, str(number), max_tokens=5) for number in range(2000)))
        stats = loop.stats()
        assert 20 <= stats.max_running <= 500
        assert 10 <= stats.running_seconds / stats.busy_seconds <= stats.max_running
        before = stats.max_running
        ends = asyncio.gather(*(ask(loop, f"more {number}", max_tokens=5) for number in range(100)))
        engine.preemptions += 1
        await ends
        assert loop.stats().max_running < before
        assert loop.stats().preemptions == 1
    finally:
        await loop.stop()

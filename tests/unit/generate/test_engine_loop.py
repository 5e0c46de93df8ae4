"""The engine's thread, with an engine that needs no model: requests take one step a token, weights are a number."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from goaly.generate.loop import EngineLoop
from goaly.generate.request import EngineFailed, Finish, Sample, Sampling


class CountingEngine:
    """Samples the token 7 until a request has its `max_tokens`; breaks when told to."""

    def __init__(self) -> None:
        self.version = 0
        self.breaks = False
        self._written: dict[str, list[int]] = {}
        self._wanted: dict[str, int] = {}

    @property
    def under_way(self) -> int:
        return len(self._written)

    def counts(self) -> tuple[int, int]:
        return len(self._written), 0

    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        if (sampling.top_p or 0) > 1:
            raise ValueError(f"request {name}: top_p={sampling.top_p}")
        self._written[name] = []
        self._wanted[name] = sampling.max_tokens

    def cancel(self, names: list[str]) -> list[tuple[str, Sample]]:
        return [(name, self._end(name, Finish.CANCELLED)) for name in names if name in self._written]

    def step(self) -> list[tuple[str, Sample]]:
        if self.breaks:
            raise RuntimeError("the cache caught fire")
        for versions in self._written.values():
            versions.append(self.version)
        full = [name for name, versions in self._written.items() if len(versions) == self._wanted[name]]
        return [(name, self._end(name, Finish.LENGTH)) for name in full]

    def apply(self, fill: Callable[[], int]) -> int:
        self.version = fill()
        return self.version

    def _end(self, name: str, finish: Finish) -> Sample:
        versions = torch.tensor(self._written.pop(name), dtype=torch.int32)
        count = len(versions)
        return Sample(tokens=torch.full((count,), 7), logprobs=torch.zeros(count), versions=versions, finish=finish)


@pytest.fixture
async def engine():
    return CountingEngine()


@pytest.fixture
async def loop(engine):
    weights = iter(range(1, 100))
    loop = EngineLoop(engine, apply_mode="keep", max_running=1000, fill=lambda: next(weights))
    yield loop
    await loop.stop()


ENDLESS = Sampling(max_tokens=10**9)


def ask(loop: EngineLoop, name: str, max_tokens: int = 5, min_version: int = 0) -> asyncio.Task[Sample]:
    return asyncio.ensure_future(loop.generate(name, [1], Sampling(max_tokens=max_tokens), min_version=min_version))


@pytest.mark.timeout(20)
async def test_many_requests_at_once_all_get_their_own_sample(loop):
    samples = await asyncio.gather(*(ask(loop, str(n), max_tokens=n) for n in range(1, 300)))
    assert [len(sample.tokens) for sample in samples] == list(range(1, 300))
    assert loop.stats().tokens == sum(range(1, 300))


@pytest.mark.timeout(20)
async def test_a_request_for_newer_weights_sees_no_older_ones(loop):
    held = ask(loop, "held", min_version=2)
    assert (await ask(loop, "free")).versions.tolist() == [0] * 5
    await loop.apply(1)
    assert not held.done()
    await loop.apply(2)
    assert (await held).versions.tolist() == [2] * 5


@pytest.mark.timeout(20)
async def test_cancelling_ends_a_request_with_what_it_has_and_a_held_one_with_nothing(loop):
    running = asyncio.ensure_future(loop.generate("running", [1], ENDLESS, min_version=0))
    held = ask(loop, "held", min_version=9)
    await ask(loop, "meanwhile")
    loop.cancel(["running", "held", "unknown"])
    assert (await running).finish is Finish.CANCELLED
    assert len((await running).tokens) >= 5
    assert len((await held).tokens) == 0


@pytest.mark.timeout(20)
async def test_giving_up_a_call_ends_its_request_in_the_engine(loop, engine):
    call = asyncio.ensure_future(loop.generate("given up", [1], ENDLESS, min_version=0))
    await ask(loop, "meanwhile")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await ask(loop, "after it")
    assert not engine.under_way


@pytest.mark.timeout(20)
async def test_a_request_that_the_engine_refuses_fails_alone(loop):
    running = ask(loop, "sound", max_tokens=1000)
    with pytest.raises(ValueError, match="top_p=3"):
        await loop.generate("broken", [1], Sampling(max_tokens=1, top_p=3), min_version=0)
    assert len((await running).tokens) == 1000


@pytest.mark.timeout(20)
async def test_an_engine_that_breaks_fails_every_request_with_the_cause_and_takes_no_new_one(loop, engine):
    """LO-2"""
    under_way = [asyncio.ensure_future(loop.generate(str(n), [1], ENDLESS, min_version=n)) for n in range(3)]
    waiter = asyncio.ensure_future(loop.version_at_least(9))
    await asyncio.sleep(0)
    engine.breaks = True
    for call in [*under_way, waiter, ask(loop, "late")]:
        with pytest.raises(EngineFailed, match="the cache caught fire") as failed:
            await call
        assert isinstance(failed.value.__cause__, RuntimeError)


@pytest.mark.timeout(20)
async def test_closing_fails_what_is_still_under_way(engine):
    loop = EngineLoop(engine, apply_mode="keep", max_running=1000, fill=lambda: 1)
    call = asyncio.ensure_future(loop.generate("endless", [1], ENDLESS, min_version=0))
    await asyncio.sleep(0)
    await loop.stop()
    with pytest.raises(EngineFailed, match="closed"):
        await call

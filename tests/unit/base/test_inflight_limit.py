"""The limit of requests under way, in virtual time: an engine with a key-value cache of a certain size."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from goaly.base.inflight_limit import InflightLimit, MeasuredLoad

LOADS = st.builds(
    MeasuredLoad,
    under_way=st.integers(0, 2000),
    holds_back=st.booleans(),
    cache_use=st.floats(0, 1),
    queued=st.integers(0, 500),
    preemptions=st.integers(0, 50),
    ended=st.integers(0, 2000),
    failed=st.integers(0, 2000),
)


@dataclass
class Engine:
    """Writes a token to each running request in a step, and preempts the youngest where the cache is full."""

    cache: int
    """Tokens that it holds."""
    limit: InflightLimit
    length: Callable[[], int]
    running: list[list[int]] = field(default_factory=list)
    """Tokens of each request, and how many it has at its end; the oldest first."""
    preempted: list[list[int]] = field(default_factory=list)
    preemptions: int = 0
    ended: int = 0
    limits: list[int] = field(default_factory=list)

    def step(self, failing: bool = False) -> None:
        """One step. While requests fail, those that begin end at once."""
        failed = 0
        while len(self.running) + len(self.preempted) + failed < self.limit.value:
            if failing:
                failed += 1
            else:
                self.running.append([1, self.length()])
        used = self.used
        while self.preempted and used + self.preempted[0][0] <= self.cache:
            self.running.append(self.preempted.pop(0))
            used += self.running[-1][0]
        for request in self.running:
            request[0] += 1
        preemptions = 0
        used = self.used
        while used > self.cache:
            self.preempted.insert(0, self.running.pop())
            used -= self.preempted[0][0]
            preemptions += 1
        still = [request for request in self.running if request[0] < request[1]]
        ended, self.running = len(self.running) - len(still), still
        self.preemptions += preemptions
        self.ended += ended
        under_way = len(self.running) + len(self.preempted)
        use = self.used / self.cache
        load = MeasuredLoad(
            under_way=under_way, holds_back=True, cache_use=use, preemptions=preemptions, ended=ended, failed=failed
        )
        self.limit.observe(load)
        self.limits.append(self.limit.value)

    @property
    def used(self) -> int:
        return sum(tokens for tokens, _ in self.running)


def heavy_tailed(seed: int, shortest: int, longest: int) -> Callable[[], int]:
    draw = random.Random(seed)
    return lambda: min(longest, int(shortest * draw.paretovariate(1.2)))


@given(loads=st.lists(LOADS, max_size=60), start=st.integers(1, 500), least=st.integers(1, 200))
def test_a_limit_is_never_below_the_least_nor_above_the_most_whatever_happens(loads, start, least):  # base-5
    limit = InflightLimit(start=start, least=least, most=300)
    for load in loads:
        limit.observe(load)
        assert least <= limit.value <= 300


@given(loads=st.lists(LOADS, max_size=60), start=st.integers(1, 500))
def test_a_limit_that_shrank_does_not_change_before_the_work_under_way_fits_it(loads, start):  # base-5
    limit = InflightLimit(start=start, least=1, most=1000)
    for load in loads:
        before = limit.value
        limit.observe(load)
        assert limit.value == before or load.under_way <= before


@settings(max_examples=15, deadline=None)
@given(shortest=st.integers(10, 200), longest=st.integers(40, 200), fits=st.integers(8, 60), times=st.integers(1, 8))
@example(shortest=200, longest=200, fits=40, times=4)  # all end at once: many steps find the cache full meanwhile
def test_a_full_cache_never_leads_to_a_cascade_of_cuts(shortest, longest, fits, times):  # base-5
    """However far above the fitting number it starts, it ends near the number that always fits, not at the least."""
    limit = InflightLimit(start=fits * times, least=1, most=10**4)
    engine = Engine(cache=fits * longest, limit=limit, length=heavy_tailed(fits, min(shortest, longest), longest))
    for _ in range(10 * longest):
        engine.step()
        assert limit.value >= int(0.7 * fits)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), share=st.floats(0.2, 1.0))
def test_it_comes_to_rest_with_a_well_used_cache_and_hardly_any_preemption(seed, share):
    draw, longest = random.Random(seed), 100
    limit = InflightLimit(start=20, least=20, most=10**4)
    engine = Engine(cache=20 * longest, limit=limit, length=lambda: draw.randint(int(share * 30), int(share * 100)))
    for _ in range(60 * longest):
        engine.step()
    engine.limits.clear()
    engine.preemptions = engine.ended = 0
    used = []
    for _ in range(30 * longest):
        engine.step()
        used.append(engine.used / engine.cache)
    assert engine.preemptions <= 0.01 * engine.ended
    assert max(engine.limits) <= 1.6 * min(engine.limits)
    assert sum(one != other for one, other in pairwise(engine.limits)) <= 8
    if limit.value > limit.least:
        assert sum(used) / len(used) > 0.45


def test_it_grows_to_a_multiple_of_the_start_where_answers_are_much_shorter_than_the_longest():
    limit = InflightLimit(start=20, least=20, most=10**4)
    engine = Engine(cache=2000, limit=limit, length=heavy_tailed(0, 10, 100))
    for _ in range(4000):
        engine.step()
    assert 40 <= limit.value <= 100


def test_answers_that_become_longer_shrink_it_and_shorter_ones_let_it_grow_again():
    length = 20
    limit = InflightLimit(start=20, least=5, most=10**4)
    engine = Engine(cache=2000, limit=limit, length=lambda: random.randint(length // 2, length))
    for _ in range(3000):
        engine.step()
    before = limit.value
    length = 200
    for _ in range(6000):
        engine.step()
    assert 8 <= limit.value < before / 4
    length = 20
    for _ in range(6000):
        engine.step()
    assert limit.value > 0.6 * before


@pytest.mark.parametrize("failing_steps", [1, 50, 1000])
def test_it_holds_while_requests_fail(failing_steps: int):
    limit = InflightLimit(start=20, least=20, most=10**4)
    engine = Engine(cache=2000, limit=limit, length=heavy_tailed(1, 10, 100))
    for _ in range(4000):
        engine.step()
    before = limit.value
    for _ in range(failing_steps):
        engine.step(failing=True)
        assert limit.value == before


def test_it_does_not_grow_where_nothing_is_held_back():
    limit = InflightLimit(start=20, least=20, most=10**4)
    for _ in range(100):
        limit.observe(MeasuredLoad(under_way=15, holds_back=False, cache_use=0.1, ended=15))
    assert limit.value == 20


def test_a_long_queue_at_the_engines_shrinks_it_to_what_they_run_and_a_reserve():
    limit = InflightLimit(start=1000, least=10, most=10**4)
    for _ in range(200):
        under_way = limit.value
        limit.observe(
            MeasuredLoad(under_way=under_way, holds_back=True, cache_use=0.5, queued=max(0, under_way - 100), ended=100)
        )
    assert 100 <= limit.value <= 140

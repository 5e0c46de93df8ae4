"""The pool of environments: its bound, its fairness, and what becomes of dead environments."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.base.telemetry.metrics import counting
from goaly.environments.pool import EnvironmentPool, FairPlaces


class Fake:
    def __init__(self, kept: "Kept"):
        self._kept = kept
        self.alive = True
        kept.open += 1
        kept.most = max(kept.most, kept.open)

    async def close(self):
        await asyncio.sleep(0)
        self._kept.open -= 1


class Kept:
    """Makes environments, and counts those that exist."""

    def __init__(self, *failures: Exception):
        self.open = self.most = 0
        self.failures = list(failures)

    async def make(self) -> Fake:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        return Fake(self)


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "b", "c", "give", "cancel a", "cancel b"]), max_size=60), st.integers(1, 3))
def test_places_go_to_waiting_tasks_in_turn(operations, count):
    """environments-4."""

    async def run() -> None:
        places, taken = FairPlaces(count), 0
        waiting: dict[str, list[asyncio.Task[None]]] = {"a": [], "b": [], "c": []}
        passed: dict[str, Counter[str]] = {}  # for each waiting task: what others got since it waits
        for operation in operations:
            before = {name: list(tasks) for name, tasks in waiting.items()}
            if operation in waiting:
                waiting[operation].append(asyncio.create_task(places.take(operation)))
            elif operation == "give":
                if taken:
                    places.give()
                    taken -= 1
            elif tasks := waiting[operation[-1]]:
                tasks.pop(0).cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            for name, tasks in waiting.items():
                for task in [task for task in tasks if task.done()]:
                    assert task is tasks.pop(0), "the first to wait is the first to get a place"
                    taken += 1
                    if task in before[name]:
                        passed.pop(name, None)
                        for other in passed:
                            passed[other][name] += 1
                            assert passed[other][name] <= 1, f"{name} got two while {other} waited"
            passed = {name: passed.get(name, Counter()) for name, tasks in waiting.items() if tasks}
            assert taken <= count
            assert taken == count or not places.waiting, "a place is free and somebody waits"
            assert places.waiting == sum(map(len, waiting.values()))
        for task in [task for tasks in waiting.values() for task in tasks]:
            task.cancel()
        await asyncio.sleep(0)
        assert places.waiting == 0

    asyncio.run(run())


async def test_one_task_with_many_episodes_does_not_starve_another():
    """environments-4."""
    kept, order = Kept(), []

    async def episode(pool: EnvironmentPool[Fake], task: str) -> None:
        async with pool.lease(task):
            order.append(task)
            await asyncio.sleep(0)

    with counting() as counts:
        async with EnvironmentPool(kept.make, size=2) as pool, asyncio.TaskGroup() as tasks:
            for _ in range(1000):
                tasks.create_task(episode(pool, "many"))
            await asyncio.sleep(0)
            assert pool.waiting == 998
            for _ in range(5):
                tasks.create_task(episode(pool, "few"))
    assert order.index("few") < 10
    assert [place for place, task in enumerate(order) if task == "few"][-1] < 20
    assert (len(order), kept.most, pool.started) == (1005, 2, 2)
    assert counts == {"environment/started": 2, "environment/waits": 1003}
    assert kept.open == 0


async def test_a_dead_environment_is_replaced_and_a_warm_one_is_used_again():
    """environments-4."""
    kept = Kept()
    with counting() as counts:
        await _replace_two(kept)
    assert counts == {"environment/started": 3, "environment/replaced": 2}
    assert kept.open == 0


async def _replace_two(kept: Kept) -> None:
    async with EnvironmentPool(kept.make, size=1) as pool:
        async with pool.lease("a") as first:
            pass
        async with pool.lease("b") as second:
            assert second is first
            second.alive = False
        for _ in range(3):
            await asyncio.sleep(0)
        assert kept.open == 0, "it is closed before anybody needs its place"
        async with pool.lease("a") as third:
            assert third is not first
            assert kept.open == 1
        third.alive = False  # while it is idle
        async with pool.lease("a") as fourth:
            assert fourth is not third
        assert (pool.started, pool.replaced, kept.most) == (3, 2, 1)


async def test_neither_a_failed_start_nor_a_cancelled_waiter_nor_a_failed_episode_keeps_a_place():
    """environments-4."""
    kept = Kept(RuntimeError("no memory"))
    async with EnvironmentPool(kept.make, size=1) as pool:
        with pytest.raises(RuntimeError, match="no memory"):
            async with pool.lease("a"):
                pass
        with pytest.raises(ValueError, match="the episode's own"):
            async with pool.lease("a"):
                raise ValueError("the episode's own")
        async with pool.lease("a"):
            waiting = [asyncio.create_task(pool.lease(task).__aenter__()) for task in "ab"]
            await asyncio.sleep(0)
            waiting[0].cancel()
        waiting[1].cancel()  # at the moment at which it gets the place
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(5), pool.lease("a"):
            assert pool.waiting == 0
    assert kept.open == 0


async def test_an_environment_that_comes_back_after_the_end_is_closed():
    kept = Kept()
    pool = EnvironmentPool(kept.make, size=2)
    async with pool.lease("a"):
        await pool.close()
        assert kept.open == 1
    await pool.close()
    assert kept.open == 0

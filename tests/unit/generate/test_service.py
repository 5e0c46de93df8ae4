"""The generator service against replicas that start, die, fail to start, and hang while they start."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from goaly.base.errors import RunFailed
from goaly.generate.service import MAX_DEATHS, WINDOW_SECONDS, GeneratorService

pytestmark = pytest.mark.timeout(20)


class FakeRanks:
    """The actors of a replica; `start.stream()` does what the stage says for this name."""

    def __init__(self, name: str, begin: Callable[[], Any]):
        self.name = name
        self.start = self
        self.stats = self.close = self
        self._begin = begin
        self.dead = False
        self.store = "store"

    @property
    def follow(self) -> "FakeRanks":
        return self

    async def call(self, store: str) -> None:
        if self.dead:
            raise SupervisionError("died")
        self.store = store

    def stream(self) -> Iterator[Awaitable[None]]:
        return iter([self._begin()])

    async def call_one(self) -> str:
        if self.dead:
            raise SupervisionError("died")
        return self.name

    def slice(self, procs: int) -> "FakeRanks":
        assert procs == 0
        return self


class Stage:
    """Spawns fakes, and keeps what was announced and killed."""

    def __init__(self) -> None:
        self.spawned: list[FakeRanks] = []
        self.killed: list[str] = []
        self.announced: asyncio.Queue[list[str]] = asyncio.Queue()
        self.starts: dict[str, Callable[[], Any]] = {}
        self.seconds = 0.0
        self.announcing = 0
        self.may_announce = asyncio.Event()
        self.may_announce.set()

    async def spawn(self, name: str) -> FakeRanks:
        self.spawned.append(FakeRanks(name, self.starts.get(name, well)))
        return self.spawned[-1]

    async def kill(self, name: str) -> None:
        self.killed.append(name)

    async def announce(self, serving: Mapping[str, Any]) -> None:
        assert all(handle.name == name for name, handle in serving.items())
        self.announcing += 1
        assert self.announcing == 1, "two tables on their way may overtake each other"
        await self.may_announce.wait()
        self.announcing -= 1
        self.announced.put_nowait(sorted(serving))

    def service(self, replicas: int, start_minutes: float = 1.0) -> GeneratorService:
        return GeneratorService(
            replicas=replicas,
            spawn=self.spawn,
            kill=self.kill,
            announce=self.announce,
            start_minutes=start_minutes,
            clock=lambda: self.seconds,
        )


async def until(holds: Callable[[], Any]) -> None:
    """Let the other tasks run until this holds."""
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not hold")


async def well() -> None:
    pass


async def dies() -> None:
    raise SupervisionError("Endpoint call start() failed\nits process died")


async def raises() -> None:
    raise ActorError(ValueError("the cache does not fit"))


async def raises_of_another() -> None:
    raise pickle.loads(pickle.dumps(ActorError(ActorError(ValueError("no such version")))))


async def dies_of_another() -> None:
    raise ActorError(SupervisionError("Endpoint call join() failed\nthe hub died"))


async def hangs() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(stage: Stage, replicas: int, start_minutes: float = 1.0) -> AsyncIterator[GeneratorService]:
    """A started service under supervision."""
    service = stage.service(replicas, start_minutes)
    await service.start()
    await stage.announced.get()
    supervision = asyncio.create_task(service.supervise())
    yield service
    supervision.cancel()
    await asyncio.wait([supervision])


async def test_all_replicas_serve_when_start_returns() -> None:
    stage = Stage()
    await stage.service(2).start()
    assert await stage.announced.get() == ["generator-0", "generator-1"]


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (dies, "generator-1 failed to start: its process died"),
        (raises, "generator-1 failed to start: ValueError: the cache does not fit"),
        (raises_of_another, "generator-1 failed to start: ValueError: no such version"),
        (dies_of_another, "generator-1 failed to start: the hub died"),
        (hangs, r"generator-1 did not start within generator.start_minutes=0.0001"),
    ],
)
async def test_a_replica_that_cannot_start_at_first_ends_the_run_with_its_name_and_the_cause(start, why) -> None:
    stage = Stage()
    stage.starts["generator-1"] = start
    with pytest.raises(BaseExceptionGroup) as raised:
        await stage.service(2, start_minutes=0.0001).start()
    assert raised.group_contains(RunFailed, match=f"^{why}$")
    assert stage.killed == ["generator-1"]


async def test_the_death_of_one_rank_during_the_first_start_ends_the_run_though_the_others_hang() -> None:
    stage = Stage()
    stage.starts["generator-0"] = hangs
    service = stage.service(1)
    start = asyncio.create_task(service.start())
    await until(lambda: stage.spawned)
    assert service.lost("generator-0", "process 7 ended")
    with pytest.raises(BaseExceptionGroup) as raised:
        await start
    assert raised.group_contains(RunFailed, match="generator-0 died while it started: process 7 ended")


async def test_a_dead_replica_leaves_at_once_its_other_ranks_are_killed_and_a_new_one_serves_when_it_has_caught_up():
    stage = Stage()
    caught_up = asyncio.Event()
    stage.starts["generator-0-1"] = caught_up.wait
    async with serving(stage, 2) as service:
        assert service.lost("generator-0", "killed")
        assert await stage.announced.get() == ["generator-1"]  # generate-11
        await until(lambda: len(stage.spawned) >= 3)
        assert stage.killed == ["generator-0"]  # generate-11
        assert stage.announced.empty()
        caught_up.set()
        assert await stage.announced.get() == ["generator-0-1", "generator-1"]
        assert service.lost("generator-0", "told once more, by who noticed late")
        assert await service.stats() == ["generator-1", "generator-0-1"]
        assert stage.announced.empty()


@pytest.mark.parametrize("start", [dies, raises, hangs])
async def test_a_replacement_that_cannot_start_is_killed_and_replaced_in_its_turn(start) -> None:
    stage = Stage()
    stage.starts["generator-0-1"] = start
    async with serving(stage, 1, start_minutes=0.0001) as service:
        service.lost("generator-0", "killed")
        assert await stage.announced.get() == []
        assert await stage.announced.get() == ["generator-0-2"]
        assert stage.killed == ["generator-0", "generator-0-1"]


async def test_a_replacement_that_dies_while_it_starts_is_replaced_at_once_though_its_other_ranks_hang() -> None:
    stage = Stage()
    stage.starts["generator-0-1"] = hangs
    async with serving(stage, 1) as service:
        service.lost("generator-0", "killed")
        await until(lambda: len(stage.spawned) >= 2)
        assert service.lost("generator-0-1", "killed too")
        assert await stage.announced.get() == []
        assert await stage.announced.get() == ["generator-0-2"]
        assert stage.killed == ["generator-0", "generator-0-1"]


async def die(stage: Stage, service: GeneratorService, times: int, every: float) -> None:
    for death in range(times):
        stage.seconds += every
        service.lost(stage.spawned[-1].name, f"death {death}")
        assert await stage.announced.get() == []
        await stage.announced.get()


async def ends(service: GeneratorService, supervision: asyncio.Task[None]) -> str:
    with pytest.raises(BaseExceptionGroup) as raised:
        await supervision
    error = raised.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, RunFailed)
    return str(error)


async def under_supervision(stage: Stage) -> tuple[GeneratorService, asyncio.Task[None]]:
    service = stage.service(1)
    await service.start()
    await stage.announced.get()
    return service, asyncio.create_task(service.supervise())


async def test_a_replica_that_keeps_dying_ends_the_run_with_its_name_and_the_last_report() -> None:
    stage = Stage()
    service, supervision = await under_supervision(stage)
    await die(stage, service, MAX_DEATHS, every=WINDOW_SECONDS / (MAX_DEATHS + 1))
    stage.seconds += WINDOW_SECONDS / (MAX_DEATHS + 1)
    service.lost(stage.spawned[-1].name, "the last death")
    why = await ends(service, supervision)
    assert why.startswith("generator 0 died or failed to start 6 times within 10 minutes of serving")
    assert why.endswith("died: the last death")


async def test_deaths_that_are_far_apart_are_forgiven() -> None:
    stage = Stage()
    async with serving(stage, 1) as service:
        await die(stage, service, 4 * MAX_DEATHS, every=WINDOW_SECONDS / MAX_DEATHS)
        assert len(stage.spawned) == 1 + 4 * MAX_DEATHS


async def test_replacements_that_never_serve_end_the_run_however_slowly_they_fail() -> None:
    stage = Stage()

    async def fails_after_an_hour() -> None:
        stage.seconds += 3600
        raise ActorError(OSError("no memory"))

    service, supervision = await under_supervision(stage)
    stage.starts |= {f"generator-0-{number}": fails_after_an_hour for number in range(1, 100)}
    service.lost("generator-0", "killed")
    assert (await ends(service, supervision)).endswith("failed to start: OSError: no memory")
    assert len(stage.killed) == 1 + MAX_DEATHS


async def test_tables_reach_the_routers_in_the_order_in_which_they_became_true() -> None:
    stage = Stage()
    async with serving(stage, 2) as service:
        stage.may_announce.clear()
        service.lost("generator-0", "killed")
        service.lost("generator-1", "killed")
        await until(lambda: len(stage.killed) >= 2)
        stage.may_announce.set()
        tables = [await stage.announced.get() for _ in range(4)]
        assert tables[-1] == ["generator-0-1", "generator-1-1"]


async def test_a_replica_that_died_is_missing_from_the_counts_and_fails_nothing() -> None:
    stage = Stage()
    service = stage.service(2)
    await service.start()
    stage.spawned[0].dead = True
    assert await service.stats() == ["generator-1"]
    await service.close()


async def test_the_death_of_another_actor_is_not_its_business() -> None:
    service = Stage().service(1)
    assert not service.lost("trainer", "killed")


async def test_replicas_follow_the_store_that_replaces_a_dead_one_and_those_that_start_begin_again_with_it() -> None:
    stage = Stage()
    stage.starts["generator-1-1"] = hangs  # at the dead store
    async with serving(stage, 3) as service:
        service.lost("generator-1", "killed")
        await until(lambda: len(stage.spawned) == 4)
        stage.spawned[2].dead = True
        await service.follow("store-1")
        assert [ranks.store for ranks in stage.spawned[:3]] == ["store-1", "store", "store"]
        assert await stage.announced.get() == ["generator-0", "generator-2"]
        assert await stage.announced.get() == ["generator-0", "generator-1-2", "generator-2"]

"""The generator service against replicas that start, die while starting, and die again."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from goaly.errors import RunFailed
from goaly.generate.service import MAX_REPLACEMENTS, GeneratorService


class FakeStart:
    def __init__(self, ranks: "FakeRanks"):
        self._ranks = ranks

    async def call(self) -> None:
        await self._ranks.may_start.wait()
        if self._ranks.dies_while_starting:
            raise SupervisionError("died")


class FakeRanks:
    def __init__(self, name: str):
        self.name = name
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.dies_while_starting = False
        self.start = FakeStart(self)

    def slice(self, procs: int) -> "FakeRanks":
        assert procs == 0
        return self


class Stage:
    """Spawns fakes, and keeps what was announced."""

    def __init__(self) -> None:
        self.spawned: list[FakeRanks] = []
        self.retired: list[str] = []
        self.announced: asyncio.Queue[list[str]] = asyncio.Queue()
        self.broken: set[str] = set()

    async def spawn(self, name: str) -> FakeRanks:
        ranks = FakeRanks(name)
        ranks.dies_while_starting = name in self.broken
        self.spawned.append(ranks)
        return ranks

    async def retire(self, name: str) -> None:
        self.retired.append(name)

    async def announce(self, serving: Mapping[int, Any]) -> None:
        self.announced.put_nowait([serving[index].name for index in sorted(serving)])

    def service(self, replicas: int) -> GeneratorService:
        return GeneratorService(replicas=replicas, spawn=self.spawn, retire=self.retire, announce=self.announce)


async def test_all_replicas_serve_when_start_returns() -> None:
    stage = Stage()
    await stage.service(2).start()
    assert await stage.announced.get() == ["generator-0", "generator-1"]


async def test_a_dead_replica_leaves_at_once_and_a_new_one_serves_when_it_has_caught_up() -> None:
    stage = Stage()
    service = stage.service(2)
    await service.start()
    await stage.announced.get()
    supervision = asyncio.create_task(service.supervise())
    assert service.lost("generator-0", "killed")
    assert await stage.announced.get() == ["generator-1"]  # GS-2
    assert await stage.announced.get() == ["generator-0-1", "generator-1"]
    assert stage.retired == ["generator-0"]
    assert service.lost("generator-0", "told once more, by who noticed late")
    assert stage.announced.empty()
    supervision.cancel()


async def test_a_replacement_that_dies_while_starting_is_replaced_in_its_turn() -> None:
    stage = Stage()
    service = stage.service(1)
    await service.start()
    await stage.announced.get()
    stage.broken.add("generator-0-1")
    supervision = asyncio.create_task(service.supervise())
    service.lost("generator-0", "killed")
    assert await stage.announced.get() == []
    for _ in range(10):
        await asyncio.sleep(0)
    service.lost("generator-0-1", "killed too")
    assert await stage.announced.get() == []
    assert await stage.announced.get() == ["generator-0-2"]
    supervision.cancel()


async def test_a_replica_that_keeps_dying_ends_the_run_with_its_name() -> None:
    stage = Stage()
    service = stage.service(1)
    await service.start()
    supervision = asyncio.create_task(service.supervise())
    await stage.announced.get()
    for death in range(MAX_REPLACEMENTS + 1):
        service.lost(stage.spawned[-1].name, f"death {death}")
        assert await stage.announced.get() == []
        if death < MAX_REPLACEMENTS:
            await stage.announced.get()
    with pytest.raises(BaseExceptionGroup) as raised:
        await supervision
    assert raised.group_contains(RunFailed, match="generator 0 died 6 times")


async def test_the_death_of_another_actor_is_not_its_business() -> None:
    service = Stage().service(1)
    assert not service.lost("trainer", "killed")

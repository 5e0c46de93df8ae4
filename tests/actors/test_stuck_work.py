"""A process that lives, but whose work never ends: it ends itself, and its owner replaces it."""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from monarch.actor import Actor, concurrent_endpoint, current_rank

from goaly.base.errors import ReplicaLost
from goaly.generate.request import Sample, Sampling
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.plan.host_settings import HostSettings
from goaly.plan.placement import ANYWHERE, IMPORTS, Placed, Processes
from goaly.run.hosts import Hosts
from goaly.train.rank_thread import RankThread

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(240)


class Ranks(Actor):
    """Rank 1 never ends its step."""

    def __init__(self) -> None:
        self._thread: RankThread[Any] = RankThread("train")

    @concurrent_endpoint
    async def step(self) -> None:
        rank = current_rank().rank
        await self._thread.run(lambda: time.sleep(1000 * rank), "train")


def stuck_generator() -> type:
    """A generator whose steps can be made to hang. Made here, because importing it imports vLLM's packages."""
    from goaly.generate.generator import Generator
    from goaly.generate.vllm_engine import VllmEngine

    class Stuck(Generator):
        @concurrent_endpoint
        async def get_stuck(self) -> None:
            def step(self: VllmEngine) -> Any:
                time.sleep(1000)  # releases the interpreter's lock: the process answers heartbeats

            VllmEngine.step = step

    return Stuck


def spawned(hosts: Hosts, name: str, role: str, count: int = 1) -> Any:
    placed = Placed(seats=range(1), ranks=(ANYWHERE,) * count)
    return hosts.spawn(Processes(name=name, role=role, count=count), placed)


async def test_a_rank_that_is_stuck_in_a_step_ends_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPORTS, "rollout", ())
    lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    hosts = Hosts(HostSettings(stuck_seconds=1.0), tmp_path, lambda *report: lost.put_nowait(report), trace=False)
    spawned(hosts, "trainer", "rollout", 2).spawn("trainer", Ranks).step.broadcast()
    while (reported := await lost.get())[0] != "trainer":  # late news of another test's processes
        pass
    report = reported[1]
    await hosts.stop_all()
    assert "ended: train has made no progress for hosts.stuck_seconds=1, in " in report
    assert "Ranks.step" in report
    assert "trainer.1.log" in report
    assert "time.sleep(1000" in (tmp_path / "logs" / "trainer.1.log").read_text()  # in the stack


async def test_a_replica_that_is_stuck_in_a_step_ends_and_is_replaced(tiny_model_folder: Path, tmp_path: Path) -> None:
    from goaly.generate.connection import Connection
    from goaly.generate.service import GeneratorService

    reports: list[str] = []
    serving: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def lost(name: str, report: str) -> None:
        if service.lost(name, report):
            reports.append(report)

    hosts = Hosts(HostSettings(stuck_seconds=4.0), tmp_path, lost, trace=False)  # longer than a step if many run here
    settings = GeneratorSettings(max_running=8, max_context=512, kv_cache_gib=0.01)

    async def spawn(name: str) -> Any:
        model = ModelSettings(path=str(tiny_model_folder))
        return spawned(hosts, name, "generator").spawn(name, stuck_generator(), settings, model)

    service = GeneratorService(
        replicas=1, spawn=spawn, kill=hosts.kill, announce=serving.put, start_minutes=5, clock=time.monotonic
    )

    async def ask(replica: Any) -> Sample:
        return await Connection(replica).submit("one", [3, 4, 5], Sampling(max_tokens=4))

    await service.start()
    supervising = asyncio.create_task(service.supervise())
    ((name, first),) = (await serving.get()).items()
    assert len((await ask(first)).tokens) == 4
    await first.get_stuck.call_one()
    with pytest.raises(ReplicaLost):
        await ask(first)
    assert await serving.get() == {}
    ((successor, second),) = (await serving.get()).items()
    assert (name, successor) == ("generator-0", "generator-0-1")
    assert len((await ask(second)).tokens) == 4
    assert "ended: the engine has made no progress for hosts.stuck_seconds=4, in " in reports[0]
    supervising.cancel()
    await service.close()
    await hosts.stop_all()

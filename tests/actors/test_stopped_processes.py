"""The processes of a run as its controller sees them: stopped ones, and those that gave up."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, concurrent_endpoint, current_rank

from goaly.base.errors import RunFailed
from goaly.base.process import ExitWatch, SilenceWatch, give_up, process_mark
from goaly.plan.host_settings import HostSettings
from goaly.plan.placement import ANYWHERE, IMPORTS, Placed, Processes
from goaly.run.hosts import Hosts

pytestmark = pytest.mark.timeout(120)


class Member(Actor):
    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def give_up(self) -> None:
        give_up("the disk is full")

    @concurrent_endpoint
    async def fail_in_a_callback(self) -> None:
        def breaks() -> None:
            raise KeyError("sabotage")

        SilenceWatch(breaks, seconds=0.01, tick_seconds=0.01)


class Rank(Actor):
    """Rank 1 fails; rank 0 waits for it, as in a collective."""

    @concurrent_endpoint
    async def start(self) -> None:
        await self._together()

    @concurrent_endpoint
    async def step(self, batch: Any) -> None:
        await self._together()

    async def _together(self) -> None:
        if current_rank().rank == 1:
            raise RuntimeError("no memory")
        await asyncio.Future()


async def test_one_ranks_failure_is_the_failure_of_all_while_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from goaly.generate.service import GeneratorService  # not above: the processes import this module for its actors
    from goaly.run.replaceable_actors import ReplaceableActors
    from goaly.run.trainer_stage import TrainerStage

    monkeypatch.setitem(IMPORTS, "rollout", ())
    hosts = Hosts(HostSettings(), tmp_path, lambda *report: None, trace=False)
    processes = Processes(name="pair", role="rollout", count=2)
    ranks = hosts.spawn(processes, Placed(seats=range(1), ranks=(ANYWHERE,) * 2)).spawn("rank", Rank)
    killed: list[str] = []

    async def spawn(name: str) -> Any:
        return ranks

    async def kill(name: str) -> None:
        killed.append(name)

    async def announce(replicas: Any) -> None:
        raise AssertionError("nothing serves")

    service = GeneratorService(replicas=1, spawn=spawn, kill=kill, announce=announce, start_minutes=5)
    async with asyncio.timeout(60):
        with pytest.raises(RunFailed, match=r"^trainer\.step failed: RuntimeError: no memory$"):
            await TrainerStage(ReplaceableActors("trainer", ranks), steps=1, folder=tmp_path).step(None)
        with pytest.raises(ExceptionGroup) as failed:
            await service.start()
    assert str(failed.value.exceptions[0]) == "generator-0 failed to start: RuntimeError: no memory"
    assert killed == ["generator-0"]
    await hosts.stop_all()


async def test_a_stopped_process_is_killed_and_named_and_one_that_gave_up_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPORTS, "rollout", ())
    lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    hosts = Hosts(HostSettings(silent_seconds=2.0), tmp_path, lambda *report: lost.put_nowait(report), trace=False)

    async def reported(name: str) -> str:
        async with asyncio.timeout(40):
            while (report := await lost.get())[0] != name:
                pass
        return report[1]

    def spawned(name: str, count: int) -> Any:
        placed = Placed(seats=range(1), ranks=(ANYWHERE,) * count)
        mesh = hosts.spawn(Processes(name=name, role="rollout", count=count), placed)
        return mesh.spawn(f"{name}-member", Member)

    quitter, caller, pair = spawned("quitter", 1), spawned("caller", 1), spawned("pair", 2)
    pids = [pid for _, pid in (await pair.pid.call()).items()]
    ended = [asyncio.Event() for _ in pids]
    watches = [ExitWatch(process_mark(pid), event.set) for pid, event in zip(pids, ended, strict=True)]
    await quitter.pid.call_one()
    os.kill(pids[1], signal.SIGSTOP)
    quitter.give_up.broadcast()
    assert "ended: the disk is full; its log is" in await reported("quitter")
    caller.fail_in_a_callback.broadcast()
    assert "ended: callback SilenceWatch._tick failed: KeyError: 'sabotage'; its log is" in await reported("caller")
    report = await reported("pair")
    assert f"process {pids[1]} has not answered for 2 s (hosts.silent_seconds)" in report
    assert "pair.1.log" in report
    await asyncio.wait_for(ended[1].wait(), 10)
    os.kill(pids[0], signal.SIGSTOP)
    await hosts.stop_all()  # it can't follow
    await asyncio.wait_for(ended[0].wait(), 10)
    for watch in watches:
        watch.close()

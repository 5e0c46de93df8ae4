"""The processes of a run as its controller sees them: stopped ones, and those that gave up."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, concurrent_endpoint

from goaly.process import give_up
from goaly.run.hosts import Hosts
from goaly.run.placement import ANYWHERE, Placed
from goaly.run.processes import IMPORTS, Processes
from goaly.run.settings import HostSettings
from goaly.weights.liveness import ExitWatch, SilenceWatch, process

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
    watches = [ExitWatch(process(pid), event.set) for pid, event in zip(pids, ended, strict=True)]
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
    await hosts.stop_all()  # HO-2: it can't follow
    await asyncio.wait_for(ended[0].wait(), 10)
    for watch in watches:
        watch.close()

"""A pool over real sandboxes: its bounds and turns, its warm sandboxes, and what becomes of starts that fail."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from goaly.sandboxes.contract import FileSnapshot, SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.namespaces import NamespaceHost, NamespaceSandbox
from goaly.sandboxes.pool import SandboxPool
from goaly.sandboxes.reaper import live_sandboxes
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.settings import PoolSettings
from goaly.sandboxes.start_slots import StartSlots
from tests.unit.sandboxes.conftest import SMALL

SECONDS = 20
SPEC = SandboxSpec(limits=SMALL)


class Watched(NamespaceHost):
    """A host whose starts can be waited for, or hang."""

    started: asyncio.Queue[NamespaceSandbox]
    hanging = False

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> NamespaceSandbox:
        if self.hanging:
            await asyncio.Event().wait()
        sandbox = await super().start(spec, origin=origin)
        self.started.put_nowait(sandbox)
        return sandbox

    async def next(self) -> NamespaceSandbox:
        """The next one that has started."""
        return await asyncio.wait_for(self.started.get(), SECONDS)


Pools = Callable[..., Any]


@pytest.fixture
async def pool_of() -> AsyncIterator[Pools]:
    """Makes pools, with the host below."""
    async with AsyncExitStack() as closing:

        async def make(**settings: Any) -> tuple[SandboxPool, Watched]:
            host = await Watched.open()
            host.started = asyncio.Queue()
            pool = SandboxPool(host, PoolSettings(**settings))
            closing.push_async_callback(pool.close)
            return pool, host

        yield make


def of_task(task: str) -> SandboxSpec:
    return SandboxSpec(limits=SMALL, labels={"task": task})


def told_of_the_end(sandbox: Sandbox) -> asyncio.Event:
    """Set when the sandbox has ended."""
    ended = asyncio.Event()
    sandbox.when_ended(ended.set)
    return ended


async def until_it_waits(*starts: asyncio.Future[Any]) -> None:
    """Let all that can go on do so; the starts are not done then."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(start.done() for start in starts)


async def test_a_start_beyond_the_bound_waits_until_one_is_stopped_or_dies(pool_of: Pools):
    pool, _ = await pool_of(most=2)
    first, second = await pool.start(SPEC), await pool.start(SPEC)
    third, fourth = [asyncio.ensure_future(pool.start(SPEC)) for _ in range(2)]
    await until_it_waits(third, fourth)
    await first.stop()
    assert (await (await asyncio.wait_for(third, SECONDS)).run("echo lives")).ok
    await until_it_waits(fourth)
    os.kill(second.pid, signal.SIGKILL)
    assert (await (await asyncio.wait_for(fourth, SECONDS)).run("echo lives")).ok


async def test_memory_and_disk_are_bounds_too(pool_of: Pools):
    pool, _ = await pool_of(memory_gib=0.5)
    first = await pool.start(SPEC)
    await pool.start(SPEC)
    third = asyncio.ensure_future(pool.start(SPEC))
    await until_it_waits(third)
    await first.stop()
    await asyncio.wait_for(third, SECONDS)
    small, _ = await pool_of(disk_gib=0.01)
    with pytest.raises(SandboxUnavailable, match="limit of files, 64 MiB"):
        await small.start(SPEC)


async def test_tasks_take_turns_however_many_starts_each_has(pool_of: Pools):
    pool, _ = await pool_of(most=1)
    held = await pool.start(SPEC)
    served = []

    async def use(task: str) -> None:
        sandbox = await pool.start(of_task(task))
        served.append(task)
        await sandbox.stop()

    waiting = [asyncio.ensure_future(use(task)) for task in ("a", "a", "a", "b", "b", "c")]
    await until_it_waits(*waiting)
    await held.stop()
    await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
    assert served == ["a", "b", "c", "a", "b", "a"]


async def test_a_warm_sandbox_is_given_with_the_labels_of_its_user_and_replaced(pool_of: Pools):
    pool, host = await pool_of(warm=1)
    await pool.start(of_task("a"))
    await host.next()
    warm = await host.next()
    given = await pool.start(of_task("b"))
    assert given is warm
    assert next(one.labels for one in live_sandboxes() if one.pid == warm.pid) == {"task": "b"}
    assert given.spec.labels == {"task": "b"}
    assert await host.next() is not given  # the next one is warm


async def test_a_warm_sandbox_has_its_whole_time_to_live_when_it_is_given(pool_of: Pools):
    pool, host = await pool_of(warm=1)
    spec = SandboxSpec(limits=SMALL, seconds_to_live=0.5)
    await pool.start(spec)
    await host.next()
    warm = await host.next()
    assert warm.spec.seconds_to_live is None
    assert await pool.start(spec) is warm
    ended = told_of_the_end(warm)
    await asyncio.wait_for(ended.wait(), SECONDS)


async def test_a_dead_warm_sandbox_is_not_given(pool_of: Pools, monkeypatch: pytest.MonkeyPatch):
    pool, host = await pool_of(warm=1)
    await pool.start(SPEC)
    await host.next()
    warm = await host.next()
    ended = told_of_the_end(warm)
    os.kill(warm.pid, signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), SECONDS)
    given = await asyncio.wait_for(pool.start(SPEC), SECONDS)
    assert given is not warm
    assert (await given.run("echo lives")).ok
    assert await host.next() is given

    async def has_just_died(spec: SandboxSpec) -> None:
        raise SandboxDied("the sandbox has ended")

    dying = await host.next()
    monkeypatch.setattr(dying, "assign", has_just_died)
    assert await asyncio.wait_for(pool.start(SPEC), SECONDS) is not dying


async def test_warm_sandboxes_make_room_for_starts_of_other_states(pool_of: Pools):
    pool, host = await pool_of(most=3, warm=2)
    await pool.start(SPEC)
    for _ in range(3):
        await host.next()
    assert len(live_sandboxes_of(host)) == 3
    other = SandboxSpec(limits=SMALL, environment={"A": "other"})
    two = await asyncio.wait_for(asyncio.gather(pool.start(other), pool.start(other)), SECONDS)
    assert [(await one.run("echo $A")).stdout.text() for one in two] == ["other\n"] * 2
    assert len(live_sandboxes_of(host)) == 3


async def test_a_snapshot_is_a_state_and_forgetting_it_ends_its_warm_sandboxes(pool_of: Pools):
    pool, host = await pool_of(warm=1)
    first = await pool.start(SPEC)
    await first.run("echo kept > /tmp/state")
    await host.next()
    other = await host.next()
    snapshot = await first.snapshot()
    await pool.start(SPEC, origin=snapshot)
    await host.next()
    warm = await host.next()
    assert (await warm.run("cat /tmp/state")).stdout.text() == "kept\n"
    ended = told_of_the_end(warm)
    await pool.forget(snapshot)
    await asyncio.wait_for(ended.wait(), SECONDS)
    assert other.alive()


async def test_a_start_that_hangs_fails_after_its_limit_and_its_place_goes_to_the_next(pool_of: Pools):
    pool, host = await pool_of(most=1, starts_at_once=1, start_seconds=0.2)
    host.hanging = True
    hung, following = [asyncio.ensure_future(pool.start(SPEC)) for _ in range(2)]
    with pytest.raises(SandboxUnavailable, match=r"within 0.2 s \(sandbox.pool.start_seconds\)"):
        await asyncio.wait_for(hung, SECONDS)
    host.hanging = False
    with pytest.raises(SandboxUnavailable):
        await asyncio.wait_for(following, SECONDS)  # it had begun when the host still hung
    assert (await pool.start(SPEC)).alive()


async def test_a_start_that_fails_gives_its_place_back(pool_of: Pools, tmp_path: Path):
    pool, _ = await pool_of(most=1, warm=1)
    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match="cannot be the root"):
            await pool.start(SandboxSpec(root=tmp_path / "none", limits=SMALL))
    assert (await asyncio.wait_for(pool.start(SPEC), SECONDS)).alive()


async def test_a_cancelled_start_leaves_no_sandbox_and_no_place_taken_wherever_it_was(pool_of: Pools):
    pool, host = await pool_of(most=2, warm=1)
    held = await pool.start(SPEC)
    for steps in range(25):
        if steps == 12:
            await held.stop()
        start = asyncio.ensure_future(pool.start(of_task("cancelled")))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        for done in await asyncio.gather(start, return_exceptions=True):
            if not isinstance(done, BaseException):
                await done.stop()
    two = await asyncio.wait_for(asyncio.gather(pool.start(SPEC), pool.start(SPEC)), SECONDS)
    assert all(one.alive() for one in two)
    assert len(live_sandboxes_of(host)) == 2


async def test_closing_ends_those_that_wait_and_the_warm_ones(pool_of: Pools):
    pool, host = await pool_of(most=2, warm=1)
    await pool.start(SPEC)
    await host.next()
    warm = await host.next()
    await pool.start(SPEC)
    waiting = asyncio.ensure_future(pool.start(of_task("late")))
    await until_it_waits(waiting)
    await pool.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await waiting
    assert not warm.alive()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await pool.start(SPEC)


async def test_one_that_is_adopted_takes_a_place_and_those_in_use_are_left():
    name = f"test-{secrets.token_hex(6)}"
    first = SandboxPool(await NamespaceHost.open(shared=name), PoolSettings(warm=1))
    second = SandboxPool(await NamespaceHost.open(shared=name), PoolSettings(most=1))
    sandbox = await first.start(SPEC)
    await first.leave()
    adopted = await second.adopt(sandbox.ticket)
    waiting = asyncio.ensure_future(second.start(SPEC))
    await until_it_waits(waiting)
    await adopted.stop()
    assert (await asyncio.wait_for(waiting, SECONDS)).alive()
    await second.close()


def live_sandboxes_of(host: NamespaceHost) -> list[int]:
    """The pids of this process's sandboxes that live."""
    return [one.pid for one in live_sandboxes() if one.starter == os.getpid()]


HOLDER = """
import asyncio, sys
from pathlib import Path
from goaly.sandboxes.start_slots import StartSlots

async def main():
    slots = StartSlots(Path(sys.argv[1]), 2)
    async with slots.one(), slots.one():
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_starts_of_all_processes_share_the_slots_and_a_killed_one_gives_its_back(tmp_path: Path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "starts")]
    other = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert other.stdout
    assert await other.stdout.readline() == b"held\n"
    slots = StartSlots(tmp_path / "starts", 2)

    async def one() -> None:
        async with slots.one():
            pass

    cancelled, *waiting = [asyncio.ensure_future(one()) for _ in range(5)]
    await until_it_waits(cancelled, *waiting)
    cancelled.cancel()
    await until_it_waits(*waiting)
    other.kill()
    await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
    await other.wait()
    slots.close()


async def test_slots_bound_the_starts_of_one_process(tmp_path: Path):
    slots = StartSlots(tmp_path / "starts", 3)
    now, most = 0, 0

    async def one() -> None:
        nonlocal now, most
        async with slots.one():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    await asyncio.gather(*(one() for _ in range(30)))
    assert most == 3
    slots.close()

"""What is left of sandboxes whose processes were killed, and who removes it; which sandboxes live, and for how long."""

import asyncio
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from goaly.sandboxes import reaper
from goaly.sandboxes.contract import SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.control_groups import hierarchies
from goaly.sandboxes.namespaces import NamespaceHost, NamespaceSandbox
from goaly.sandboxes.owner import identity
from goaly.sandboxes.reaper import live_sandboxes, reap
from tests.unit.sandboxes.conftest import SMALL, groups_of_server

OTHER = """
import asyncio, sys
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost

async def main():
    host = await NamespaceHost.open()
    limits = Limits(memory_mib=256, disk_mib=8, processes=32)
    sandbox = await host.start(SandboxSpec(limits=limits, labels={"task": "other's", "run": "r1"}))
    print(host.server.process.pid, sandbox.pid, host.server.address.parent, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SECONDS = 20


@dataclass(frozen=True)
class Other:
    """Another process with one sandbox."""

    process: subprocess.Popen[str]
    server: int
    sandbox: int
    name: str
    """The identity of its server."""
    folder: Path

    def traces(self) -> list[str]:
        """The control groups and the folder that exist."""
        return groups_of_server(self.name) + [str(self.folder)] * self.folder.exists()

    def kill_all(self) -> None:
        """As a power cut does: nobody has the time to remove anything."""
        self.process.send_signal(signal.SIGSTOP)
        os.kill(self.server, signal.SIGKILL)
        self.process.kill()
        wait_for_the_end_of(self.server, self.sandbox)
        self.process.wait()


@contextmanager
def other_process() -> Iterator[Other]:
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            server, sandbox, folder = process.stdout.readline().split()
            yield Other(process, int(server), int(sandbox), identity(int(server)), Path(folder))
        finally:
            process.kill()


def wait_for_the_end_of(*pids: int) -> None:
    """Return when the processes, which need not be children, have ended."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], SECONDS)[0], f"process {pid} is still there"
        os.close(descriptor)


def test_a_killed_process_leaves_nothing_because_its_server_removes_all():
    with other_process() as other:
        assert len(other.traces()) == len(hierarchies()) + 1
        other.process.kill()
        wait_for_the_end_of(other.server, other.sandbox)
        assert other.traces() == []


async def test_the_next_start_removes_what_is_left_when_the_server_was_killed_too_and_nothing_of_the_living(
    sandbox: NamespaceSandbox,
):
    with other_process() as killed, other_process() as living:
        assert len(killed.traces()) == len(hierarchies()) + 1
        killed.kill_all()
        before = living.traces()
        next_one = await NamespaceHost.open()
        await next_one.close()
        assert killed.traces() == []
        assert living.traces() == before
        assert (await sandbox.run("echo lives")).stdout.text() == "lives\n"
        os.kill(living.sandbox, 0)


@pytest.fixture
def own_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The prefix of groups that this test alone removes, with its own folder of servers: other tests start hosts."""
    prefix = f"test-{secrets.token_hex(6)}-"
    monkeypatch.setattr(reaper, "PREFIX", prefix)
    monkeypatch.setattr(reaper, "servers_folder", lambda: tmp_path)
    yield prefix
    for tree in hierarchies():
        for group in tree.root.glob(f"{prefix}*"):
            group.rmdir()


def test_reap_says_what_it_removed_and_ends_processes_in_groups_that_nobody_owns(own_traces: str, tmp_path: Path):
    left = [tmp_path / "dead"]
    left[0].mkdir()
    with subprocess.Popen(["sleep", "1000"]) as ended:
        dead = identity(ended.pid)
        ended.kill()
    with subprocess.Popen(["sleep", "1000"]) as survivor:
        for tree in hierarchies():
            group = tree.root / f"{own_traces}{dead}-1-999"
            group.mkdir()
            (group / "cgroup.procs").write_text(str(survivor.pid))
            left.append(group)
        if not hierarchies():
            survivor.kill()
        assert {line.rpartition(" ")[2] for line in reap()} == {str(path) for path in left}
        assert not any(path.exists() for path in left)
        survivor.wait(SECONDS)


async def test_live_sandboxes_of_every_process_are_listed_with_their_labels(host: NamespaceHost):
    with other_process() as other:
        mine = await host.start(SandboxSpec(limits=SMALL, labels={"task": "mine"}))
        listed = {one.pid: one for one in live_sandboxes()}
        assert listed[mine.pid].labels == {"task": "mine"}
        assert listed[other.sandbox].labels == {"task": "other's", "run": "r1"}
        assert (listed[other.sandbox].starter, listed[other.sandbox].owned) == (other.process.pid, True)
        await mine.stop()
        assert mine.pid not in {one.pid for one in live_sandboxes()}
        said = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goaly.sandboxes", "list", stdout=subprocess.PIPE
        )
        assert b"task=other's run=r1" in (await said.communicate())[0]


async def test_a_sandbox_ends_when_its_time_to_live_is_over_with_and_without_a_client(host: NamespaceHost):
    client = await NamespaceHost.open(shared=f"test-{secrets.token_hex(6)}")
    left = await client.start(SandboxSpec(limits=SMALL, seconds_to_live=0.3, seconds_unowned=1000))
    await client.leave()
    owned = await host.start(SandboxSpec(limits=SMALL, seconds_to_live=0.3))
    ended = asyncio.Event()
    owned.when_ended(ended.set)
    async with asyncio.timeout(SECONDS):
        await ended.wait()
    assert not owned.alive()
    await asyncio.to_thread(wait_for_the_end_of, left.pid)


async def test_an_assigned_sandbox_has_new_labels_and_a_new_time_to_live(host: NamespaceHost):
    spec = SandboxSpec(limits=SMALL, seconds_to_live=1000, labels={"task": "none"})
    sandbox = await host.start(spec)
    await sandbox.assign(replace(spec, labels={"task": "a"}))
    assert next(one.labels for one in live_sandboxes() if one.pid == sandbox.pid) == {"task": "a"}
    assert sandbox.spec.labels == {"task": "a"}
    ended = asyncio.Event()
    sandbox.when_ended(ended.set)
    await sandbox.assign(replace(spec, seconds_to_live=0.2))
    async with asyncio.timeout(SECONDS):
        await ended.wait()


async def test_a_start_that_is_cancelled_leaves_no_sandbox(host: NamespaceHost):
    assert host.server
    await (await host.start(SandboxSpec(limits=SMALL))).stop()
    for steps in range(6):
        start = asyncio.ensure_future(host.start(SandboxSpec(limits=SMALL, labels={"task": "cancelled"})))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    last = await host.start(SandboxSpec(limits=SMALL))
    await last.stop()  # the server handles requests in turn
    assert [one for one in live_sandboxes() if one.labels.get("task") == "cancelled"] == []


async def test_a_server_that_does_not_answer_is_left_alone(host: NamespaceHost):
    assert host.server
    folder = host.server.address.parent
    host.server.process.send_signal(signal.SIGSTOP)
    try:
        assert f"folder {folder}" not in await asyncio.wait_for(asyncio.to_thread(reap), SECONDS)
        assert folder.is_dir()
    finally:
        host.server.process.send_signal(signal.SIGCONT)
    host.server.process.kill()
    host.server.process.wait()
    reap()
    assert not folder.exists()


def starter_of(server: int) -> int:
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "starter\n")


async def test_a_server_that_loses_a_part_of_itself_ends_with_its_sandboxes_and_leaves_nothing():
    host = await NamespaceHost.open()
    assert host.server
    server, folder = host.server.process.pid, host.server.address.parent
    name = identity(server)
    sandbox = await host.start(SandboxSpec(limits=SMALL))
    ended = asyncio.Event()
    sandbox.when_ended(ended.set)
    os.kill(starter_of(server), signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        await ended.wait()
    await asyncio.to_thread(host.server.process.wait)
    assert groups_of_server(name) == []
    assert not folder.exists()
    with pytest.raises((SandboxDied, SandboxUnavailable)):
        await host.start(SandboxSpec(limits=SMALL))
    await host.close()

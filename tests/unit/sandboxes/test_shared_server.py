"""One server of sandboxes for several processes of a host: who has a sandbox, and what is left when they have gone."""

import asyncio
import fcntl
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from goaly.sandboxes.contract import SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.namespaces import NamespaceHost, SandboxTicket
from goaly.sandboxes.server import SOCKET, shared_folder
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import SMALL, process_ended

CLIENT = """
import asyncio, pickle, sys
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost

async def main():
    host = await NamespaceHost.open(shared=sys.argv[1])
    limits = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)
    sandbox = await host.start(SandboxSpec(limits=limits, seconds_unowned=int(sys.argv[2])))
    await sandbox.run("echo kept > /tmp/state; sleep 1000 & true")
    sys.stdout.buffer.write(pickle.dumps(sandbox.ticket).hex().encode() + b"\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def server_of(pid: int) -> int:
    """The server that started a sandbox."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def client_of(name: str, seconds_unowned: int) -> SandboxTicket:
    """The sandbox of a process that was killed."""
    words = [sys.executable, "-c", CLIENT, name, str(seconds_unowned)]
    client = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert client.stdout
    ticket = pickle.loads(bytes.fromhex((await asyncio.wait_for(client.stdout.readline(), 30)).decode()))
    client.kill()
    await client.wait()
    return ticket


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def hosts(name: str) -> AsyncIterator[tuple[NamespaceHost, NamespaceHost]]:
    """Two clients of one server."""
    async with AsyncExitStack() as closing:
        first, second = [await NamespaceHost.open(shared=name) for _ in range(2)]
        for host in (first, second):
            closing.push_async_callback(host.close)
        yield first, second


async def test_another_client_adopts_a_sandbox_and_its_files(hosts: tuple[NamespaceHost, NamespaceHost]):
    first, second = hosts
    sandbox = await first.start(SandboxSpec(limits=SMALL))
    shell = await Shell.open(sandbox)
    await shell.run("echo kept > /tmp/state")
    adopted = await second.adopt(sandbox.ticket)
    assert (await adopted.run("cat /tmp/state")).stdout.text() == "kept\n"
    await adopted.stop()


async def test_the_end_of_an_earlier_clients_command_is_not_that_of_an_adopters(
    hosts: tuple[NamespaceHost, NamespaceHost],
):
    first, second = hosts
    sandbox = await first.start(SandboxSpec(limits=SMALL))
    left = await sandbox.start("echo $$ > /tmp/pid; mkfifo /tmp/end; read line < /tmp/end; exit 9")
    await first.leave()
    left.close()
    adopted = await second.adopt(sandbox.ticket)
    wait = "until [ -p /tmp/end ]; do :; done; echo > /tmp/end; while kill -0 $(cat /tmp/pid) 2>/dev/null; do :; done"
    result = await adopted.run(f"{wait}; echo kept")
    assert (result.exit_code, result.stdout.text()) == (0, "kept\n")


async def test_an_adopted_sandbox_is_forked_after_its_first_client_has_gone(
    hosts: tuple[NamespaceHost, NamespaceHost],
):
    first, second = hosts
    sandbox = await first.start(SandboxSpec(limits=SMALL))
    await sandbox.run("echo kept > /tmp/state")
    await first.leave()
    adopted = await second.adopt(sandbox.ticket)
    fork = await second.start(adopted.spec, origin=await adopted.snapshot())
    assert (await fork.run("cat /tmp/state")).stdout.text() == "kept\n"


async def test_a_sandbox_without_a_client_ends_after_its_time(hosts: tuple[NamespaceHost, NamespaceHost]):
    left = await hosts[0].start(SandboxSpec(limits=SMALL, seconds_unowned=1))
    await hosts[0].leave()
    began = time.monotonic()
    await process_ended(left.pid)
    assert time.monotonic() - began > 0.5


async def test_many_processes_start_one_server_and_each_has_names_of_its_own(name: str):
    opened = await asyncio.gather(*(NamespaceHost.open(shared=name) for _ in range(8)))
    sandboxes = await asyncio.gather(*(host.start(SandboxSpec(limits=SMALL)) for host in opened))
    assert len({sandbox.ticket.number for sandbox in sandboxes}) == 8
    seen = [(await sandbox.run("echo alive")).stdout.text() for sandbox in sandboxes]
    assert seen == ["alive\n"] * 8
    await asyncio.gather(*(host.close() for host in opened))


async def test_a_client_that_comes_while_the_server_ends_starts_another(name: str):
    folder = shared_folder(name)
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # the last that an ending server gives up
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
        ending.bind(str(folder / SOCKET))
        ending.listen()
        opening = asyncio.create_task(NamespaceHost.open(shared=name))
        connection, _ = await asyncio.to_thread(ending.accept)
        connection.close()
    await asyncio.sleep(0.1)
    (folder / SOCKET).unlink()
    await asyncio.sleep(0.1)
    os.close(lock)
    host = await asyncio.wait_for(opening, 20)
    assert (await (await host.start(SandboxSpec(limits=SMALL))).run("echo alive")).stdout.text() == "alive\n"
    await host.close()


async def test_a_client_that_is_killed_leaves_its_sandbox_to_another_and_then_nothing(name: str):
    ticket = await client_of(name, 30)
    server = server_of(ticket.pid)
    host = await NamespaceHost.open(shared=name)
    adopted = await host.adopt(ticket)
    result = await adopted.run("cat /tmp/state; ls /proc | grep -c '^[0-9]'")
    assert result.stdout.text().split() == ["kept", "5"]  # its first process, the job, sh, ls, grep
    await host.close()
    await process_ended(server)
    assert not shared_folder(name).exists()


async def test_sandboxes_of_killed_clients_end_with_their_server_after_their_time(name: str):
    ticket = await client_of(name, 1)
    await process_ended(server_of(ticket.pid))
    assert not shared_folder(name).exists()


async def test_after_a_server_was_killed_the_next_client_starts_another(
    hosts: tuple[NamespaceHost, NamespaceHost], name: str
):
    sandbox = await hosts[0].start(SandboxSpec(limits=SMALL))
    running = asyncio.ensure_future(sandbox.run("sleep 60"))
    os.kill(server_of(sandbox.pid), signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await asyncio.wait_for(running, 20)
    with pytest.raises((SandboxDied, SandboxUnavailable)):
        await hosts[1].start(SandboxSpec(limits=SMALL))
    other = await NamespaceHost.open(shared=name)
    assert (await (await other.start(SandboxSpec(limits=SMALL))).run("echo alive")).stdout.text() == "alive\n"
    await other.close()

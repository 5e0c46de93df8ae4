"""Servers of sandboxes that are killed, stopped, full, back again, or that do not know a client."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from goaly.sandboxes.contract import SandboxDied, SandboxFull, SandboxSpec, SandboxUnavailable, SnapshotLost
from goaly.sandboxes.pool import SandboxPool
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.settings import PoolSettings, RemoteSettings
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import SMALL, RemoteServer, first_process, process_ended

SPEC = SandboxSpec(limits=SMALL)
Started = Callable[..., RemoteServer]


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts servers, which end with the test."""
    servers: list[RemoteServer] = []

    def start(*settings: str, tokens: str = "", port: int = 0) -> RemoteServer:
        servers.append(RemoteServer(*settings, tokens=tokens, port=port))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


async def opened(*servers: RemoteServer, **settings: object) -> RemoteHost:
    return await RemoteHost.open(RemoteSettings(servers=tuple(server.url for server in servers), **settings))


async def test_a_killed_server_takes_its_sandboxes_and_the_other_goes_on(started: Started):
    servers = [started(), started()]
    host = await opened(*servers)
    boxes = [await host.start(SPEC) for _ in range(4)]
    assert [sum(box.ticket.server == server.url for box in boxes) for server in servers] == [2, 2]
    dying = [box for box in boxes if box.ticket.server == servers[0].url]
    told: list[str] = []
    dying[0].when_ended(lambda: told.append("ended"))
    pid = await first_process(dying[0])
    shell = await Shell.open(dying[0])
    calls = [dying[0].run("sleep 1000"), shell.run("sleep 1000"), dying[1].write("/tmp/x", b"x" * 50_000_000)]
    running = [asyncio.ensure_future(call) for call in calls]
    await dying[0].run("true")
    servers[0].end(signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
    assert [type(result) for result in results] == [SandboxDied] * 3
    assert (told, [box.alive() for box in dying]) == (["ended"], [False, False])
    with pytest.raises(SandboxDied, match=dying[1].ticket.name):
        await dying[1].run("true")
    await process_ended(pid)
    fresh = [await host.start(SPEC) for _ in range(2)]
    assert {box.ticket.server for box in fresh} == {servers[1].url}
    again = started(port=int(servers[0].url.rsplit(":", 1)[1])).url
    with pytest.raises(SandboxDied, match="has ended"):
        await host.adopt(dying[0].ticket)
    assert (await host.start(SPEC)).ticket.server == again
    await host.close()
    assert servers[1].status()["sandboxes"] == []


async def test_a_stopped_server_is_lost_after_its_silence_and_usable_when_it_goes_on(started: Started):
    server = started()
    host = await opened(server, silent_seconds=0.6, start_seconds=20.0)
    box = await host.start(SPEC)
    call = asyncio.ensure_future(box.run("sleep 1000"))
    await box.run("true")
    os.kill(server.process.pid, signal.SIGSTOP)
    flood = asyncio.ensure_future(box.write("/tmp/x", b"x" * 50_000_000))
    for result in await asyncio.wait_for(asyncio.gather(call, flood, return_exceptions=True), 20):
        assert isinstance(result, SandboxDied)
        assert "has not answered for 0.6 s" in str(result)
    waiting = asyncio.ensure_future(host.start(SPEC))
    os.kill(server.process.pid, signal.SIGCONT)
    assert (await (await waiting).run("echo back")).stdout.text() == "back\n"
    assert (await (await host.adopt(box.ticket)).run("ps -eo args | grep -c '[s]leep 1000'")).stdout.text() == "0\n"
    await host.close()


async def test_a_server_on_its_clients_host_starts_sandboxes_while_all_slots_of_clients_wait_for_it(started: Started):
    server, settings = started("sandboxes=64"), PoolSettings(most=40)
    pool = SandboxPool(await opened(server), settings)
    boxes = await asyncio.wait_for(
        asyncio.gather(*(pool.start(SPEC) for _ in range(2 * settings.starts_at_once + 1))), 120
    )
    assert (await boxes[-1].run("echo alive")).stdout.text() == "alive\n"
    await pool.close()


async def test_forks_go_to_the_server_that_has_the_snapshot_and_are_refused_when_it_is_lost(started: Started):
    servers = [started(), started()]
    host = await opened(*servers)
    box = await host.start(SPEC)
    await box.run("echo kept > /tmp/state")
    snapshot = await box.snapshot()
    forks = await asyncio.gather(*(host.start(SPEC, origin=snapshot) for _ in range(4)))
    assert {fork.ticket.server for fork in forks} == {box.ticket.server}
    assert (await forks[3].run("cat /tmp/state")).stdout.text() == "kept\n"
    await host.forget(snapshot)
    assert (await forks[0].run("cat /tmp/state")).stdout.text() == "kept\n"
    with pytest.raises(SnapshotLost):
        await host.start(SPEC, origin=snapshot)
    second = await forks[0].snapshot()
    next(server for server in servers if server.url == box.ticket.server).end(signal.SIGKILL)
    with pytest.raises(SnapshotLost):
        await host.start(SPEC, origin=second)
    await host.close()


async def test_a_full_server_is_passed_over_and_a_start_waits_for_the_first_place(started: Started):
    servers = [started("sandboxes=1"), started("sandboxes=2", "memory_gib=0.3")]
    host = await opened(*servers, start_seconds=30.0)
    boxes = await asyncio.gather(host.start(SPEC), host.start(SPEC))
    assert {box.ticket.server for box in boxes} == {server.url for server in servers}
    other = await opened(*servers, start_seconds=0.2)
    with pytest.raises(SandboxFull, match=r"within 0.2 s: .* has 1 of 1 sandboxes"):
        await other.start(SPEC)
    waiting = asyncio.ensure_future(host.start(SPEC))
    await boxes[0].run("true")
    assert not waiting.done()
    await boxes[0].stop()
    await boxes[1].stop()
    assert (await (await waiting).run("true")).ok
    await asyncio.gather(host.close(), other.close())


async def test_what_no_server_takes_is_refused_with_each_ones_reason(started: Started):
    server = started("memory_gib=0.1")
    host = await opened(server)
    with pytest.raises(SandboxUnavailable, match=r"its limit of memory, 256 MiB, is above all"):
        await host.start(SPEC)
    with pytest.raises(SandboxUnavailable, match=r"root=/usr: must be one of roots=\['/'\]"):
        await host.start(SandboxSpec(root=Path("/usr")))
    with pytest.raises(SandboxUnavailable, match=r"must have .*/root.* at a server"):
        await host.start(SandboxSpec(hidden=()))
    await host.close()


async def test_a_server_ends_with_its_sandboxes_at_sigterm(started: Started):
    server = started()
    host = await opened(server)
    box = await host.start(SPEC)
    pid = await first_process(box)
    call = asyncio.ensure_future(box.run("sleep 1000"))
    await box.run("true")
    assert await asyncio.to_thread(server.end) == 0
    with pytest.raises(SandboxDied):
        await call
    await process_ended(pid)
    await host.close()


async def test_a_client_needs_a_token(started: Started, monkeypatch: pytest.MonkeyPatch):
    server = started(tokens="first, second")
    for key in (None, "third", "first, second"):
        monkeypatch.setenv("KEY", key) if key else monkeypatch.delenv("KEY", raising=False)
        with pytest.raises(SandboxUnavailable, match=r"401 the key is not one of this server's tokens: .* KEY"):
            await opened(server, key_variable="KEY")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(server.status)
    monkeypatch.setenv("KEY", "second")
    host = await opened(server, key_variable="KEY")
    assert (await (await host.start(SPEC)).run("true")).ok
    await host.close()


async def test_without_tokens_no_web_page_and_no_other_machine_is_served(remote_server: RemoteServer):
    for headers in ({"Origin": "http://localhost"}, {"Host": "evil.example"}):
        request = urllib.request.Request(f"{remote_server.url}/v1/status", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            await asyncio.to_thread(urllib.request.urlopen, request)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words.split(), *names, *files], check=True, capture_output=True)
    return certificate, key


async def test_traffic_is_encrypted_for_those_who_trust_the_certificate(
    started: Started, certificate: tuple[Path, Path]
):
    server = started(f"certificate={certificate[0]}", f"private_key={certificate[1]}")
    assert server.url.startswith("https:")
    with pytest.raises(SandboxUnavailable, match="certificate"):
        await opened(server)
    host = await opened(server, ca=str(certificate[0]))
    box = await host.start(SPEC)
    await box.write("/tmp/x", b"x" * 3_000_000)
    assert await box.read("/tmp/x") == b"x" * 3_000_000
    await host.close()


async def test_no_server_is_an_error_that_names_each(started: Started):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SandboxUnavailable, match=r":9: .*; .* has not answered within 0.3 s"):
            await RemoteHost.open(RemoteSettings(servers=urls, silent_seconds=0.3))


CLIENT = """
import asyncio, sys
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.pool import SandboxPool
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.settings import PoolSettings, RemoteSettings

async def main():
    host = await RemoteHost.open(RemoteSettings(servers=(sys.argv[1],)))
    limits = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)
    box = await host.start(SandboxSpec(limits=limits, seconds_unowned=1))
    await box.run("sleep 1000 & true")
    running = asyncio.ensure_future(box.run("sleep 999"))
    await box.run("true")
    print("begun", flush=True)
    await running

asyncio.run(main())
"""


@pytest.fixture
async def client(remote_server: RemoteServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with a sandbox in which a command runs."""
    words = [sys.executable, "-c", CLIENT, remote_server.url]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert process.stdout
    assert await process.stdout.readline() == b"begun\n"
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_nothing_is_left_of_a_killed_client_after_the_time_for_its_adoption(
    client: asyncio.subprocess.Process, remote_server: RemoteServer
):
    host = await opened(remote_server)
    (before,) = (await asyncio.to_thread(remote_server.status))["sandboxes"]
    client.kill()
    async with asyncio.timeout(20):
        while (status := await asyncio.to_thread(remote_server.status))["sandboxes"]:
            assert status["sandboxes"][0]["name"] == before["name"]
    await host.close()

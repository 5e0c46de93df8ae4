"""Clients of a server of sandboxes: lost connections, adoption, snapshots, and output without end."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from apps.sandboxes.config import SandboxServerConfig
from apps.sandboxes.server import serving_sandboxes
from goaly.sandboxes.contract import SandboxDied, SandboxSpec, SandboxUnavailable, SnapshotLost
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.remote_sandbox import RemoteTicket
from goaly.sandboxes.settings import RemoteSettings
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import SMALL, RemoteServer

SPEC = SandboxSpec(limits=SMALL)
SEND = """
import socket
outside = socket.create_connection(("127.0.0.1", 7000))
print("begun", flush=True)
outside.sendall(bytes(20 << 20))
outside.shutdown(socket.SHUT_WR)
print(outside.recv(100))
"""
CAT = "cat > /tmp/got; echo end >> /tmp/got"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server in this process, which counts a client as gone after 0.6 s of silence."""
    async with serving_sandboxes(SandboxServerConfig(port=0, silent_seconds=0.6)) as url:
        yield url


@pytest.fixture
async def host(url: str) -> AsyncIterator[RemoteHost]:
    opened = await RemoteHost.open(RemoteSettings(servers=(url,)))
    yield opened
    await opened.close()


class Line:
    """A network between a client and a server, which can be cut, or lose all that is sent."""

    def __init__(self, url: str) -> None:
        self._to = int(url.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._open.set()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def freeze(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._open.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, other_writer]
        await asyncio.gather(self._copy(reader, other_writer), self._copy(other_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


def as_at(url: str, ticket: RemoteTicket) -> RemoteTicket:
    """The ticket for a client that has another way to the server."""
    return RemoteTicket(url, ticket.name, ticket.spec)


async def alive_there(host: RemoteHost, count: int) -> None:
    """Wait until the server has told that so many sandboxes are alive."""
    (link,) = host._links.values()
    while link._load["alive"] != count:
        host._changed.clear()
        await host._changed.wait()


async def test_a_lost_connection_ends_calls_and_the_client_adopts_its_sandbox_as_it_is(url: str):
    line = Line(url)
    async with line as way:
        host = await RemoteHost.open(RemoteSettings(servers=(way,)))
        box = await host.start(SPEC)
        await box.run("sleep 777 & echo kept > /tmp/state")
        shell, process = await Shell.open(box), await box.start(CAT)
        await process.write(b"half")
        calls = [asyncio.ensure_future(call) for call in (box.run("sleep 888"), shell.run("true; sleep 999"))]
        await box.run("until [ -s /tmp/got ] && ps -eo args | grep -q '^sleep 999'; do :; done")
        line.cut()
        for result in await asyncio.gather(*calls, process.ended, return_exceptions=True):
            assert isinstance(result, SandboxDied)
        assert not box.alive()
        adopted = await host.adopt(box.ticket)
        await adopted.run("until ! ps -eo args | grep -q '^sleep 888' && grep -q end /tmp/got; do :; done")
        seen = (await adopted.run("cat /tmp/state /tmp/got; ps -eo args | grep '^sleep 777'")).stdout.text()
        assert seen == "kept\nhalfend\nsleep 777\n"
        with pytest.raises(SandboxDied):
            await box.run("true")
        await host.close()


async def test_both_sides_notice_a_connection_over_which_nothing_comes(url: str, host: RemoteHost):
    line = Line(url)
    async with line as way:
        other = await RemoteHost.open(RemoteSettings(servers=(way,), silent_seconds=0.6))
        await other.start(SandboxSpec(limits=SMALL, seconds_unowned=1))
        taken = await other.start(SPEC)
        call = asyncio.ensure_future(taken.run("sleep 1000"))
        await taken.run("true")
        line.freeze()
        adopted = await host.adopt(as_at(url, taken.ticket))  # before the server knows that the other has gone
        assert (await adopted.run("ps -eo args | grep -c '^sleep'")).stdout.text() == "0\n"
        with pytest.raises(SandboxDied, match=r"has not answered for 0\.6 s"):
            await call
        await alive_there(host, 1)
        await other.leave()


async def test_of_clients_that_adopt_at_once_one_has_the_sandbox(url: str, host: RemoteHost):
    box = await host.start(SPEC)
    told: list[str] = []
    box.when_ended(lambda: told.append("lost"))
    running = asyncio.ensure_future(box.run("sleep 1000"))
    await box.run("true")
    others = [await RemoteHost.open(RemoteSettings(servers=(url,))) for _ in range(4)]
    results = await asyncio.gather(*(other.adopt(box.ticket) for other in others), return_exceptions=True)
    usable = []
    for adopted in results:
        with suppress(SandboxDied):
            if isinstance(adopted, BaseException):
                raise adopted
            usable.append((await adopted.run("ps -eo args | grep -c '^sleep 1000'")).stdout.text())
    assert usable == ["0\n"]
    with pytest.raises(SandboxDied):
        await running
    with pytest.raises(SandboxDied, match="another client"):
        await box.run("true")
    assert told == ["lost"]
    for other in others:
        await other.close()


async def test_snapshots_stay_while_a_client_that_uses_them_does(url: str, host: RemoteHost):
    first = await RemoteHost.open(RemoteSettings(servers=(url,)))
    box = await first.start(SPEC)
    await box.run("echo one > /tmp/x")
    snapshot = await box.snapshot()
    await box.run("echo two >> /tmp/x")
    second = await box.snapshot()
    unused = await box.snapshot()
    fork = await host.start(SPEC, origin=second)
    await first.forget(snapshot)
    await first.close()
    assert (await (await host.start(SPEC, origin=second)).run("cat /tmp/x")).stdout.text() == "one\ntwo\n"
    assert (await fork.run("cat /tmp/x")).ok
    for gone in (snapshot, unused):
        with pytest.raises(SnapshotLost):
            await host.start(SPEC, origin=gone)


async def test_a_cancelled_start_takes_no_place(url: str, host: RemoteHost):
    for steps in range(12):
        start = asyncio.ensure_future(host.start(SPEC))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        with suppress(asyncio.CancelledError):
            await (await start).stop()
    await alive_there(host, 0)


def memory_kib(pid: int) -> int:
    """The most memory that a process has had."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


async def test_output_without_end_fills_no_memory_and_holds_up_nothing_else(remote_server: RemoteServer):
    host = await RemoteHost.open(RemoteSettings(servers=(remote_server.url,)))
    box = await host.start(SPEC)
    await box.run("true")
    before = memory_kib(remote_server.process.pid)
    cut = await box.run("head -c 200M /dev/zero", output_bytes=1000)
    assert (len(cut.stdout.head), cut.stdout.omitted) == (500, (200 << 20) - 1000)
    unread = await box.start("yes >&4 & yes", extra_pipes=2, output_bytes=1000)  # nobody reads descriptor 4
    deaf = await box.start("sleep 1000")
    feeding = asyncio.ensure_future(deaf.write(bytes(100 << 20)))
    while unread.stdout.total < 50 << 20:
        assert (await box.run("echo here")).stdout.text() == "here\n"
    assert not feeding.done()
    await deaf.kill()
    assert await deaf.ended == -signal.SIGKILL
    await feeding
    await unread.kill()
    await unread.ended
    assert memory_kib(remote_server.process.pid) - before < 40_000
    await host.close()


async def test_a_connection_from_inside_waits_for_its_handler(host: RemoteHost):
    box = await host.start(SPEC)
    go_on = asyncio.Event()
    counted = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal counted
        await go_on.wait()
        while data := await reader.read(65_536):
            counted += len(data)
        writer.write(b"counted")
        writer.close()

    port = await box.serve(7000, handle)
    process = await box.start(["python3", "-c", SEND])
    begun = asyncio.Event()
    process.stdout.on_bytes = lambda data: begun.set()
    await begun.wait()
    assert (await box.run("true")).ok
    assert process.stdout.total == len("begun\n")
    go_on.set()
    assert await process.ended == 0
    assert counted == 20 << 20
    assert b"counted" in process.stdout.taken().head
    port.close()


async def test_an_upload_that_does_not_fit_fails_before_all_of_it_is_sent(host: RemoteHost):
    box = await host.start(SPEC)
    with pytest.raises(OSError, match=r"[Ss]pace|large|quota"):
        await box.write("/tmp/x", bytes(200 << 20))
    assert (await box.run("true")).ok


async def test_a_server_of_another_version_is_refused(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("goaly.sandboxes.remote_link.VERSION", 2)
    with pytest.raises(SandboxUnavailable, match=r"http://127\.0\.0\.1:\d+: this server speaks version 1, .* 2"):
        await RemoteHost.open(RemoteSettings(servers=(url,)))


async def test_what_is_cancelled_twice_is_given_back(url: str, host: RemoteHost):
    for steps in range(4):
        start = asyncio.ensure_future(host.start(SPEC))
        await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
            start.cancel()
        start.cancel()
        with suppress(asyncio.CancelledError):
            await start
    await alive_there(host, 0)

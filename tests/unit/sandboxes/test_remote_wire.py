"""The wire between a server of sandboxes and a client, its places, and its settings, without sandboxes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apps.sandboxes.capacity import Capacity
from apps.sandboxes.config import SandboxServerConfig
from goaly.base.config import load
from goaly.base.errors import ConfigError
from goaly.sandboxes.contract import Entry, Limits, SandboxDied, SandboxFull, SandboxUnavailable, SnapshotLost
from goaly.sandboxes.files import EntryReader, stream_of
from goaly.sandboxes.remote_errors import error_of, fields_of
from goaly.sandboxes.remote_wire import WINDOW, Answer, Wire, WireCall
from goaly.sandboxes.settings import RemoteSettings, SandboxSettings


class Pipe:
    """One end of a WebSocket in memory."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other = self
        self.bytes_sent = 0

    async def send(self, data: bytes) -> None:
        self.bytes_sent += len(data)
        self.other.arrived.put_nowait(data)

    async def receive(self) -> bytes | None:
        return await self.arrived.get()

    def abort(self) -> None:
        self.arrived.put_nowait(None)
        self.other.arrived.put_nowait(None)


class Served:
    """A server whose calls wait, or read what comes."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, call: WireCall) -> Answer:
        if call.op == "fail":
            raise FileNotFoundError(2, "no such file", "/x")
        self.begun.set()
        try:
            await self.go_on.wait()
            got = [len(data) async for data in call.bytes_of(0)]
        finally:
            self.ended.set()
        return Answer({"bytes": sum(got)}, b"blob")


@contextlib.asynccontextmanager
async def connected(served: Served, silent_seconds: float = 30.0) -> AsyncIterator[tuple[Wire, Pipe]]:
    ours, theirs = Pipe(), Pipe()
    ours.other, theirs.other = theirs, ours
    client = Wire(ours, served, name="the server", silent_seconds=silent_seconds, server=False)
    server = Wire(theirs, served, name="the client", silent_seconds=silent_seconds, server=True)
    running = [asyncio.create_task(wire.run()) for wire in (client, server)]
    yield client, ours
    client.lose("the test has ended")
    await asyncio.wait(running)


async def test_no_more_is_sent_than_the_reader_takes():
    served = Served()
    async with connected(served) as (wire, ours), wire.call("read") as call:
        sending = asyncio.create_task(call.send(0, bytes(10 * WINDOW)))
        await served.begun.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not sending.done()
        assert ours.bytes_sent < WINDOW + 1000
        served.go_on.set()
        await sending
        call.end(0)
        assert await call.result() == ({"bytes": 10 * WINDOW}, b"blob")


async def test_a_cancelled_caller_waits_until_the_other_side_has_ended_the_call():
    for steps in range(8):
        served = Served()
        async with connected(served) as (wire, _):
            asking = asyncio.create_task(wire.ask("read"))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert served.ended.is_set() or not served.begun.is_set()


async def test_the_loss_of_the_connection_fails_calls_and_what_is_sent_for_them():
    served = Served()
    async with connected(served) as (wire, _):
        call = wire.call("read")
        tasks = [
            asyncio.create_task(work) for work in (call.result(), call.send(0, bytes(10 * WINDOW)), call.receive(1))
        ]
        await served.begun.wait()
        wire.lose("cut")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [SandboxDied, BrokenPipeError, SandboxDied]
        await served.ended.wait()
        with pytest.raises(SandboxDied, match="cut"):
            wire.call("read")


async def test_errors_keep_their_class_and_their_words():
    async with connected(Served()) as (wire, _):
        with pytest.raises(FileNotFoundError) as raised:
            await wire.ask("fail")
        assert (raised.value.errno, raised.value.filename) == (2, "/x")
    for error in (
        SandboxDied("a"),
        SnapshotLost("b"),
        ValueError("c"),
        IsADirectoryError("d"),
        BrokenPipeError(32, "e"),
    ):
        again = error_of(fields_of(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert str(error_of(fields_of(KeyError("k")))) == "KeyError: 'k'"
    assert str(error_of({"class": "Newer", "arguments": ["w"]})) == "Newer: w"
    assert str(error_of({"class": "SystemExit", "arguments": [1]})) == "SystemExit: 1"


def test_entries_are_read_in_whatever_parts_they_come():
    entries = [Entry(path="a/b", contents=bytes(5)), Entry(path="c", kind="link", contents=b"a"), Entry(path="d")]
    stream = b"".join(stream_of(entries))
    for size in (1, 7, len(stream)):
        reader = EntryReader()
        read = [entry for at in range(0, len(stream), size) for entry in reader.feed(stream[at : at + size])]
        reader.end()
        assert read == entries


SMALL = Limits(memory_mib=100)


async def test_clients_that_wait_for_places_take_turns():
    capacity = Capacity(1, None, lambda: None)
    first = await capacity.take("greedy", SMALL, wait=False)
    with pytest.raises(SandboxFull):
        await capacity.take("other", SMALL, wait=False)
    got: list[str] = []

    async def take(client: str) -> None:
        place = await capacity.take(client, SMALL, wait=True)
        got.append(client)
        capacity.free(place)

    tasks = [asyncio.create_task(take(client)) for client in ("greedy", "greedy", "greedy", "modest", "gone")]
    await asyncio.sleep(0)
    assert (capacity.taken, capacity.waiting) == (1, 5)
    tasks[4].cancel()
    capacity.free(first)
    await asyncio.wait(tasks)
    assert got == ["greedy", "modest", "greedy", "greedy"]
    assert (capacity.taken, capacity.waiting) == (0, 0)


async def test_a_place_given_to_one_that_gives_up_at_the_same_time_goes_to_the_next():
    capacity = Capacity(1, 150.0, lambda: None)
    with pytest.raises(SandboxUnavailable, match="200 MiB"):
        await capacity.take("a", Limits(memory_mib=200), wait=True)
    place = await capacity.take("a", SMALL, wait=True)
    tasks = [asyncio.create_task(capacity.take("b", SMALL, wait=True)) for _ in range(2)]
    await asyncio.sleep(0)
    capacity.free(place)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    capacity.free(tasks[1].result())
    assert (capacity.taken, capacity.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"host": "0.0.0.0"}, r"host=0.0.0.0: must be 127.0.0.1 without tokens; set .*GOALY_SANDBOX_TOKENS"),
        ({"tokens_file": "/none"}, r"tokens_file=/none: cannot be read"),
        ({"certificate": "/x"}, r"private_key=null: set both certificate and private_key, or neither"),
        (
            {"certificate": "/x", "private_key": "/y"},
            r"certificate=/x: cannot be used with private_key=/y: .*No such file",
        ),
        ({"roots": ("/none", "usr")}, r"/none must be the absolute path of a folder"),
        ({"sandboxes": 0}, r"sandboxes=0: "),
    ],
)
def test_wrong_settings_of_a_server_are_named(
    settings: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GOALY_SANDBOX_TOKENS", raising=False)
    with pytest.raises(ConfigError, match=problem):
        raise ConfigError(SandboxServerConfig(**settings).problems(""))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, r"remote.servers=\[\]: must name at least one server"),
        ({"servers": ("sandboxes-1:8700",)}, r"sandboxes-1:8700 must be a URL without a path"),
        ({"servers": ("http://a:1/path",)}, r"http://a:1/path must be a URL without a path"),
        ({"servers": ("http://a:1", "http://a:1/")}, r"must name each server once"),
        ({"servers": ("http://a:1",), "ca": "/none"}, r"ca=/none: must be a PEM file with certificates"),
    ],
)
def test_wrong_settings_of_a_client_are_named(settings: dict[str, object], problem: str):
    remote = RemoteSettings(**settings)
    found = SandboxSettings(backend="remote", remote=remote).problems("sandbox.") + remote.problems("sandbox.remote.")
    with pytest.raises(ConfigError, match=problem):
        raise ConfigError(found)


def test_tokens_are_lines_of_a_file_or_parts_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOALY_SANDBOX_TOKENS", "a, b,")
    assert SandboxServerConfig().tokens == ("a", "b")
    (tmp_path / "tokens").write_text("c\n\n d \n")
    config = SandboxServerConfig(tokens_file=str(tmp_path / "tokens"), host="0.0.0.0")
    assert (config.tokens, config.problems("")) == (("c", "d"), [])


def test_the_example_of_a_server_is_valid():
    path = Path(__file__).parents[3] / "configs/sandboxes/server.yaml"
    loaded = load(SandboxServerConfig, ["--config", str(path)], prog="main", description="")
    assert (loaded.config.host, loaded.config.sandboxes) == ("127.0.0.1", 500)

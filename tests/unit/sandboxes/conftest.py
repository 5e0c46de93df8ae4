"""A host of sandboxes for each test, which leaves nothing behind."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from goaly.sandboxes.containers import ContainerHost
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.control_groups import PREFIX, hierarchies
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.owner import identity
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import ContainerSettings, RemoteSettings
from tests.unit.sandboxes.daemon import dockerd, missing, write_root

SMALL = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)


def groups_of_server(identity: str) -> list[str]:
    """Control groups of a server's sandboxes that exist now; other tests run beside this one."""
    return [str(group) for tree in hierarchies() for group in tree.root.glob(f"{PREFIX}{identity}-*")]


async def process_ended(pid: int) -> None:
    """Wait for the end of a process that is no child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    await asyncio.wait_for(gone.wait(), 20)
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


async def first_process(sandbox: Sandbox) -> int:
    """The first process of a sandbox, on this machine: the parent of a command."""
    mark = f"sleep {secrets.randbelow(1 << 40)}"
    process = await sandbox.start(f"echo begun; exec {mark}")
    begun = asyncio.Event()
    process.stdout.on_bytes = lambda data: begun.set()
    await begun.wait()
    while (parent := parent_of(mark)) is None:  # it is about to become that program
        pass
    return parent


def parent_of(command: str) -> int | None:
    """The parent of the process of this machine that has this command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip() == command:
                return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return None


class RemoteServer:
    """A server of sandboxes in a process of its own."""

    def __init__(self, *settings: str, tokens: str = "", port: int = 0) -> None:
        words = [sys.executable, "-m", "apps.sandboxes.main", f"port={port}", *settings]
        environment = {**os.environ, "GOALY_SANDBOX_TOKENS": tokens}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    @cached_property
    def url(self) -> str:
        """Its address, when it serves."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.startswith("serving sandboxes at "), line
        return line.split()[-1]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/status") as answer:
            return json.load(answer)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after this signal."""
        self.process.send_signal(number)
        assert self.process.stdout
        self.process.stdout.close()
        return self.process.wait(20)


@pytest.fixture(scope="session")
def remote_server() -> Iterator[RemoteServer]:
    """A server for all tests that leave nothing on it."""
    server = RemoteServer()
    yield server
    assert server.end() == 0


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The socket of a daemon of containers, and the image of a root with the usual programs.

    CONTAINER_SOCKET names a daemon that runs, such as Podman's; else Docker's is started, if it is installed."""
    root = tmp_path_factory.mktemp("root") / "root.tar"
    if running := os.environ.get("CONTAINER_SOCKET"):
        write_root(root)
        yield running, str(root)
        return
    wanted = os.environ.get("CONTAINER_TESTS")
    if reason := "CONTAINER_TESTS=skipped" if wanted == "skipped" else missing():
        assert wanted != "required", reason
        pytest.skip(reason)
    write_root(root)
    with dockerd(tmp_path_factory.mktemp("dockerd")) as address:
        yield str(address), str(root)


LOCAL = ["namespaces", pytest.param("containers", marks=pytest.mark.slow)]
"""The backends of sandboxes on this machine."""


@pytest.fixture
def backend() -> str:
    return "namespaces"


@pytest.fixture
def spec(backend: str, request: pytest.FixtureRequest) -> SandboxSpec:
    """A small sandbox of the backend."""
    small = SandboxSpec(limits=SMALL)
    return replace(small, image=request.getfixturevalue("daemon")[1]) if backend == "containers" else small


@pytest.fixture
async def host(backend: str, request: pytest.FixtureRequest) -> AsyncIterator[SandboxHost]:
    if backend == "remote":
        server = request.getfixturevalue("remote_server")
        remote = await RemoteHost.open(RemoteSettings(servers=(server.url,)))
        yield remote
        await remote.close()
        status = await asyncio.to_thread(server.status)
        assert (status["sandboxes"], status["snapshots"]) == ([], 0)
        return
    if backend == "containers":
        opened = await ContainerHost.open(ContainerSettings(socket=request.getfixturevalue("daemon")[0]))
        yield opened
        await opened.close()
        return
    opened = await NamespaceHost.open()
    assert opened.server
    server = identity(opened.server.process.pid)
    yield opened
    await opened.close()
    assert groups_of_server(server) == []


@pytest.fixture
async def sandbox(host: SandboxHost, spec: SandboxSpec) -> Sandbox:
    async with asyncio.timeout(30):
        return await host.start(spec)

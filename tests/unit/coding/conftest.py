"""A host of sandboxes for the tests of a file, which share one event loop, and pytest's place in its sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from goaly.coding.workspace import Workspaces
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.settings import SandboxSettings

SMALL = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with a host in the loop of that host."""
    for item in items:
        uses_host = item.path.parent == Path(__file__).parent and "host" in getattr(item, "fixturenames", ())
        if uses_host and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[NamespaceHost]:
    opened = await NamespaceHost.open()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(host: NamespaceHost) -> AsyncIterator[Sandbox]:
    """One with an empty folder /tmp/work."""
    async with asyncio.timeout(20):
        started = await host.start(SandboxSpec(limits=SMALL))
        await started.run(["mkdir", "/tmp/work"])
    yield started
    await started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first_workspaces(host: NamespaceHost) -> AsyncIterator[Workspaces]:
    """Has the toolbox of the file's tests: to find and lay the tools takes more than most tests do."""
    opened = Workspaces(host, SandboxSettings())
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workspaces(host: NamespaceHost, first_workspaces: Workspaces) -> AsyncIterator[Workspaces]:
    """Clean states of one test."""
    opened = Workspaces(host, SandboxSettings())
    opened._tools = first_workspaces._tools
    yield opened
    opened._tools = {}
    await opened.close()


def folder_of(tmp_path: Path, files: Mapping[str, str]) -> Path:
    folder = tmp_path / "repository"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder

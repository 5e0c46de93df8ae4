"""A host of sandboxes for each test."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from goaly.coding.workspace import Workspaces
from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox
from goaly.sandboxes.settings import SandboxSettings

SMALL = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)


@pytest.fixture
async def host() -> AsyncIterator[NamespaceHost]:
    opened = await NamespaceHost.open()
    yield opened
    await opened.close()


@pytest.fixture
async def sandbox(host: NamespaceHost) -> Sandbox:
    """One with an empty folder /tmp/work."""
    async with asyncio.timeout(20):
        started = await host.start(SandboxSpec(limits=SMALL))
        await started.run(["mkdir", "/tmp/work"])
        return started


@pytest.fixture
async def workspaces(host: NamespaceHost) -> AsyncIterator[Workspaces]:
    opened = Workspaces(host, SandboxSettings())
    yield opened
    await opened.close()


def folder_of(tmp_path: Path, files: Mapping[str, str]) -> Path:
    folder = tmp_path / "repository"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder

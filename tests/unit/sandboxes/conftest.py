"""A host of sandboxes for each test, which leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.control_groups import PREFIX, hierarchies
from goaly.sandboxes.namespaces import NamespaceHost, NamespaceSandbox
from goaly.sandboxes.owner import identity

SMALL = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)


def groups_of_server(identity: str) -> list[str]:
    """Control groups of a server's sandboxes that exist now; other tests run beside this one."""
    return [str(group) for tree in hierarchies() for group in tree.root.glob(f"{PREFIX}{identity}-*")]


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NamespaceHost]:
    opened = await NamespaceHost.open()
    assert opened.server
    server = identity(opened.server.process.pid)
    yield opened
    await opened.close()
    assert groups_of_server(server) == []


@pytest.fixture
async def sandbox(host: NamespaceHost) -> NamespaceSandbox:
    async with asyncio.timeout(20):
        return await host.start(SandboxSpec(limits=SMALL))

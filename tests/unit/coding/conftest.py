"""A host of sandboxes for each test."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox

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

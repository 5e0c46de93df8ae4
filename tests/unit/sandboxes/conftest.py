"""A host of sandboxes for each test, which leaves nothing behind."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from goaly.sandboxes.contract import Limits, SandboxSpec
from goaly.sandboxes.control_groups import hierarchies
from goaly.sandboxes.namespaces import PREFIX, NamespaceHost, NamespaceSandbox

SMALL = Limits(memory_mib=256, disk_mib=64, files=2000, processes=64, file_mib=32)


def left_behind() -> list[str]:
    """Control groups of this process' sandboxes that exist now; other tests run beside this one."""
    return [str(group) for tree in hierarchies() for group in tree.root.glob(f"{PREFIX}{os.getpid()}-*")]


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NamespaceHost]:
    before = set(left_behind())
    opened = await NamespaceHost.open()
    yield opened
    await opened.close()
    assert set(left_behind()) <= before


@pytest.fixture
async def sandbox(host: NamespaceHost) -> NamespaceSandbox:
    async with asyncio.timeout(20):
        return await host.start(SandboxSpec(limits=SMALL))

"""A snapshot that a client does not wait for leaves nothing at its server."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from apps.sandboxes.config import SandboxServerConfig
from apps.sandboxes.service import SandboxService
from goaly.sandboxes.contract import FileSnapshot, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from tests.unit.sandboxes.conftest import SMALL


class Client:
    name = "client"

    def loses(self, name: str, why: str) -> None: ...

    def told(self, load: Mapping[str, Any]) -> None: ...


async def test_a_snapshot_that_is_cancelled_between_its_two_requests_is_freed_with_its_sandbox(
    monkeypatch: pytest.MonkeyPatch,
):
    host = await NamespaceHost.open()
    service, client = SandboxService(host, SandboxServerConfig()), Client()
    service.came(client)
    held = await service.start(client, SandboxSpec(limits=SMALL), None, wait=True)
    await held.sandbox.run("echo first > /tmp/first")
    begun, may_go_on, add, forget = asyncio.Event(), asyncio.Event(), host.add_layer, host.forget
    added, freed = [], asyncio.Queue[str]()

    async def add_layer(fd: int) -> str:
        begun.set()
        await may_go_on.wait()
        added.append(await add(fd))
        return added[-1]

    async def forgets(snapshot: FileSnapshot) -> None:
        await forget(snapshot)
        freed.put_nowait(snapshot.layers[0])

    monkeypatch.setattr(host, "add_layer", add_layer)
    monkeypatch.setattr(host, "forget", forgets)
    taking = asyncio.create_task(service.snapshot(client, held))
    await begun.wait()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    may_go_on.set()
    name = await service.snapshot(client, held)  # its files stand on the layer of the first one
    fork = await service.start(client, SandboxSpec(limits=SMALL), name, wait=True)
    assert (await fork.sandbox.run("cat /tmp/first")).stdout.text() == "first\n"
    service.forget(name)
    assert freed.empty()
    await service.end(held)
    await service.end(fork)
    assert {await asyncio.wait_for(freed.get(), 20) for _ in range(2)} == set(added)
    await service.close()

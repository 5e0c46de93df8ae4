"""The sandboxes that a server holds for its clients, and the snapshots that others start from.

remote-4: A sandbox has one client at most. One whose client has gone ends after its `seconds_unowned`, unless another
    client adopts it. The last client that asks gets it, because the loss of the one before may not be known yet.
remote-5: A place is taken from before a sandbox starts until after it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from apps.sandboxes.capacity import Capacity, Place
from apps.sandboxes.config import SandboxServerConfig
from apps.sandboxes.served_process import ServedProcess
from goaly.sandboxes.contract import (
    USERS_FOLDERS,
    FileSnapshot,
    SandboxDied,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    SnapshotLost,
)
from goaly.sandboxes.sandbox import Sandbox, SandboxHost

logger = logging.getLogger(__name__)


class Client(Protocol):
    """A connected client."""

    name: str

    def loses(self, name: str, why: str) -> None:
        """A sandbox of this client has ended, or is another client's."""

    def told(self, load: Mapping[str, Any]) -> None:
        """How full the server is now."""


class HeldSandbox:
    """A sandbox, and the client that has it now."""

    def __init__(self, sandbox: Sandbox, owner: Client, place: Place, layers: Sequence[str]) -> None:
        self.name = secrets.token_hex(16)
        self.sandbox = sandbox
        self.owner: Client | None = owner
        self.place = place
        self.layers = set(layers)
        """Layers of its files that must be kept while it lives."""
        self.began = time.monotonic()
        self.ending: asyncio.TimerHandle | None = None
        """Ends it, while it has no client."""
        self.calls: set[asyncio.Task[Any]] = set()
        """Its client's calls that are not answered yet."""
        self.kept: ServedProcess | None = None
        """A command with which an adopter goes on."""
        self.gone = asyncio.Event()

    def keep(self, served: ServedProcess | None) -> None:
        """Keep this command for an adopter, in place of an earlier one."""
        before, self.kept = self.kept, served
        if before is not None and before is not served and not before.has_client:
            before.process.close()

    async def end_calls(self) -> None:
        """End the calls of a former client. Processes that it started by hand stay."""
        if tasks := set(self.calls):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class HeldSnapshot:
    """A snapshot, and the clients that made it or started from it: it is kept while one of them is there."""

    def __init__(self, files: FileSnapshot) -> None:
        self.files = files
        self.owners: set[Client] = set()
        self.ending: asyncio.TimerHandle | None = None


class SandboxService:
    """The sandboxes and snapshots of this server, for all clients."""

    def __init__(self, host: SandboxHost, config: SandboxServerConfig) -> None:
        self._host = host
        self._config = config
        self._capacity = Capacity(config.sandboxes, config.memory_mib, self._announce)
        self._sandboxes: dict[str, HeldSandbox] = {}
        self._snapshots: dict[str, HeldSnapshot] = {}
        self._loose: list[FileSnapshot] = []
        """Snapshots that nobody can start from any more, but whose layers others may need."""
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._announcing = False
        self._loop = asyncio.get_running_loop()

    def came(self, client: Client) -> None:
        """A client is there from now on."""
        self._clients.add(client)

    def load(self) -> dict[str, Any]:
        """How full this server is."""
        return {"alive": self._capacity.taken, "most": self._capacity.most, "waiting": self._capacity.waiting}

    def status(self) -> dict[str, Any]:
        """The server's state now, for people who look."""
        now = time.monotonic()
        each = [
            {
                "name": held.name,
                "labels": dict(held.sandbox.spec.labels),
                "seconds": round(now - held.began, 1),
                "owned": held.owner is not None,
            }
            for held in self._sandboxes.values()
        ]
        return {**self.load(), "clients": len(self._clients), "snapshots": len(self._snapshots), "sandboxes": each}

    async def start(self, client: Client, spec: SandboxSpec, origin: str | None, *, wait: bool) -> HeldSandbox:
        """A sandbox of a client."""
        self._check_root(spec)
        self._files_of(origin, client)
        place = await self._capacity.take(client.name, spec.limits, wait=wait)
        try:
            files = self._files_of(origin, client)  # it may have been forgotten meanwhile
            sandbox = await self._host.start(spec, origin=files)
        except BaseException:
            self._capacity.free(place)
            raise
        held = HeldSandbox(sandbox, client, place, files.layers if files else ())
        self._sandboxes[held.name] = held
        sandbox.when_ended(lambda: self._ended(held))
        return held

    def held(self, name: str) -> HeldSandbox:
        """The sandbox of this name; SandboxDied if there is none."""
        if name not in self._sandboxes:
            raise SandboxDied(f"sandbox {name} has ended")
        return self._sandboxes[name]

    def _check_root(self, spec: SandboxSpec) -> None:
        if spec.image is not None:
            return
        if str(spec.root) not in self._config.roots:
            raise SandboxUnavailable(f"root={spec.root}: must be one of roots={list(self._config.roots)} of the server")
        shown = set(USERS_FOLDERS) - set(USERS_FOLDERS if spec.hidden is None else spec.hidden)
        if str(spec.root) == "/" and shown:
            raise SandboxUnavailable(f"hidden={spec.hidden}: must have {', '.join(sorted(shown))} at a server")

    async def adopt(self, client: Client, name: str) -> HeldSandbox:
        """A sandbox is this client's from now on (remote-4)."""
        held = self.held(name)
        before, held.owner = held.owner, client
        if held.ending:
            held.ending.cancel()
        if before is not None and before is not client:
            before.loses(name, "another client has adopted it")
        try:
            if before is not client:
                await held.end_calls()
        except asyncio.CancelledError:
            self.release(client, held)
            raise
        if held.owner is not client:
            raise SandboxDied(f"another client has adopted sandbox {name} at the same time")
        return held

    def release(self, client: Client, held: HeldSandbox) -> None:
        """A client does not have this sandbox any more: it waits for another."""
        if held.owner is client:
            held.owner = None
            seconds = held.sandbox.spec.seconds_unowned
            held.ending = self._loop.call_later(seconds, lambda: self._begin(self.end(held)))

    async def end(self, held: HeldSandbox) -> None:
        """End a sandbox, and wait until it is gone."""
        with suppress(SandboxDied):
            await held.sandbox.stop()
        self._ended(held)

    def _ended(self, held: HeldSandbox) -> None:
        if self._sandboxes.pop(held.name, None) is None:
            return
        if held.ending:
            held.ending.cancel()
        held.gone.set()
        held.keep(None)
        if held.owner is not None:
            held.owner.loses(held.name, "it has ended")
        self._capacity.free(held.place)
        self._free_layers()

    async def snapshot(self, client: Client, held: HeldSandbox) -> str:
        """The name of a snapshot that was made now."""
        taking = asyncio.ensure_future(held.sandbox.snapshot())
        try:
            files = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda taken: self._drop_snapshot(held, taken))
            raise
        name = secrets.token_hex(16)
        kept = self._snapshots[name] = HeldSnapshot(files)
        kept.owners.add(client)
        held.layers |= set(files.layers)
        return name

    def _drop_snapshot(self, held: HeldSandbox, taken: asyncio.Future[FileSnapshot]) -> None:
        """Free the layer of a snapshot that its client did not wait for, once the sandbox needs it no more."""
        if not taken.cancelled() and taken.exception() is None:
            held.layers |= set(taken.result().layers)
            self._loose.append(taken.result())
            self._free_layers()

    def forget(self, name: str) -> None:
        """Nobody starts from this snapshot any more."""
        if kept := self._snapshots.pop(name, None):
            if kept.ending:
                kept.ending.cancel()
            self._loose.append(kept.files)
            self._free_layers()

    def _files_of(self, name: str | None, client: Client) -> FileSnapshot | None:
        if name is None:
            return None
        kept = self._snapshots.get(name)
        if kept is None:
            raise SnapshotLost(f"snapshot {name} is not there any more")
        kept.owners.add(client)
        if kept.ending:
            kept.ending.cancel()
            kept.ending = None
        return kept.files

    def _free_layers(self) -> None:
        """Forget the loose snapshots whose newest layer nothing else stands on."""
        needed = {layer for held in self._sandboxes.values() for layer in held.layers}
        needed |= {layer for kept in self._snapshots.values() for layer in kept.files.layers}
        free = [files for files in self._loose if files.layers[0] not in needed]
        self._loose = [files for files in self._loose if files.layers[0] in needed]
        for files in free:
            self._begin(self._host.forget(files))

    async def end_all_of(self, client: Client) -> None:
        """End what this client alone has."""
        owned = [held for held in self._sandboxes.values() if held.owner is client]
        await asyncio.gather(*map(self.end, owned))
        for name, kept in list(self._snapshots.items()):
            if kept.owners == {client}:
                self.forget(name)

    def left(self, client: Client) -> None:
        """A client has gone: what it had waits for others."""
        self._clients.remove(client)
        for held in self._sandboxes.values():
            self.release(client, held)
        for name, kept in self._snapshots.items():
            kept.owners.discard(client)
            if not kept.owners and kept.ending is None:
                kept.ending = self._loop.call_later(kept.files.spec.seconds_unowned, self.forget, name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def logged() -> None:
            try:
                await work
            except SandboxError as error:
                logger.warning("%s", error)

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _announce(self) -> None:
        """Tell all clients the load, once for all changes of this moment."""
        if not self._announcing:
            self._announcing = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._announcing = False
        for client in self._clients:
            client.told(self.load())

    async def close(self) -> None:
        """End every sandbox."""
        await self._host.close()
        for task in self._tasks:
            task.cancel()
        for held in self._sandboxes.values():
            held.gone.set()

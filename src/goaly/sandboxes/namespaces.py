"""The default backend: sandboxes of Linux namespaces on this host, without a daemon or a container runtime.

    host = await NamespaceHost.open()
    sandbox = await host.start(SandboxSpec())
    result = await sandbox.run("echo hello > /tmp/x && cat /tmp/x")

A sandbox has namespaces of its own for users, mounts, processes, network, IPC, host name and control groups. Its root
is an overlay: the layers are shared and read only, its writes go to a bounded file system in memory. Commands have no
capabilities, cannot gain any, and pass a filter of system calls; their user on the host is never 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from goaly.sandboxes.channel import Channel, Ends, Message, SocketChannel, ends_of
from goaly.sandboxes.contract import FileSnapshot, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.control_groups import PREFIX, groups_of, memory_kills
from goaly.sandboxes.owner import identity
from goaly.sandboxes.reaper import reap
from goaly.sandboxes.resident import ResidentSandbox, pipes_of_command
from goaly.sandboxes.sandbox import Handler, SandboxHost
from goaly.sandboxes.server import SandboxServer, connected, connected_to_shared

logger = logging.getLogger(__name__)

MOST_LABELS = 4096

OWN_ROOT = "an ordinary user's sandboxes need a root folder of that user's own without mounts below it"


class NamespaceHost(SandboxHost):
    """A client of a server of sandboxes on this host."""

    def __init__(self, channel: Channel, server: SandboxServer | None, number: int, pid: int) -> None:
        self.server = server
        self.groups = f"{PREFIX}{identity(pid)}-{number}-"
        """Names of the control groups of its sandboxes begin so."""
        self._channel = channel
        self._roots: dict[Path, str] = {}
        self._live: dict[int, NamespaceSandbox] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}
        self._number = number
        """Among the clients of the server; it makes names and ids unique there."""
        self._names = itertools.count(1)
        channel.on_event = self._event

    @classmethod
    async def open(cls, shared: str | None = None) -> Self:
        """A host with a server of its own, which ends with this object, or with one that processes share by a name."""
        server, connection = await asyncio.to_thread(_opened, shared)
        channel = SocketChannel(connection, "the server of sandboxes")
        number, pid = (await channel.ask("H"))[2]
        return cls(channel, server, int(number), int(pid))

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> NamespaceSandbox:
        """A sandbox in the state of its root, or of a snapshot."""
        if spec.image is not None:
            raise SandboxUnavailable(
                f"the backend namespaces has no images (image={spec.image!r}): give root, or use the backend containers"
            )
        layers = list(origin.layers) if origin else [await self._root(spec.root)]
        unique = next(self._names)
        number = (self._number << 20 | unique & 0xFFFFF) & 0xFFFFFFFF
        name = f"{self.groups}{unique}"
        limits = spec.limits
        fields = [*_use(spec), name, limits.disk_mib << 20, limits.files]
        fields += [round(spec.seconds_unowned * 1000), int(spec.debuggers)]
        hidden = () if origin else spec.hidden_folders
        fields += [len(layers), *layers, len(hidden), *hidden]
        start = asyncio.ensure_future(self._channel.ask("S", *fields, *groups_of(name, limits), number=number))
        try:
            answer = await asyncio.shield(start)
        except SandboxError as error:
            raise SandboxUnavailable(f"a sandbox did not start: {error}") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(start, number))
            raise
        sandbox = NamespaceSandbox(
            self, SandboxTicket(number, name, int(answer[2][0]), spec, tuple(layers)), answer[3][0]
        )
        self._live[number] = sandbox
        try:
            await sandbox.ready()
        except SandboxUnavailable as error:
            await sandbox.stop()
            if os.geteuid() and origin is None:
                raise SandboxUnavailable(f"{error}; {OWN_ROOT}, and root={spec.root} may be another one") from error
            raise
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    def alive(self) -> bool:
        return not self._channel.closed

    async def adopt(self, ticket: SandboxTicket) -> NamespaceSandbox:
        """Take over a sandbox of another client, with its files and background processes as they are."""
        answer = await self._channel.ask("A", number=ticket.number)
        sandbox = NamespaceSandbox(self, ticket, answer[3][0])
        if pipes := answer[3][1:]:
            command, output_bytes = map(int, answer[2][0].split())
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            letters = pipes_of_command(len(pipes) - 3)
            await sandbox.go_on_with(command, output_bytes, ends_of(pipes, letters, output_bytes, ended), ended)
        self._live[ticket.number] = sandbox
        return sandbox

    async def keep(self, ticket: SandboxTicket, number: int, output_bytes: int, pipes: Sequence[int]) -> None:
        """Leave a command's pipes with the server, for who adopts the sandbox."""
        await self._channel.ask("K", f"{number} {output_bytes}", fds=pipes, number=ticket.number)

    async def leave(self) -> None:
        """Go without ending the sandboxes: each waits `seconds_unowned` for a client that adopts it."""
        self._channel.close()
        self._forget_all()

    async def _root(self, path: Path) -> str:
        if path not in self._roots:
            name = f"root-{self._number}-{next(self._names)}"
            try:
                await self._channel.ask("I", name, str(path))
            except SandboxError as error:
                raise SandboxUnavailable(f"{path} cannot be the root of a sandbox: {error}") from error
            self._roots[path] = name
        return self._roots[path]

    async def add_layer(self, fd: int) -> str:
        """Keep a snapshot's files at the server; the name of the layer."""
        name = f"layer-{self._number}-{next(self._names)}"
        try:
            await self._channel.ask("Y", name, fds=[fd])
        finally:
            os.close(fd)
        return name

    async def forget(self, snapshot: FileSnapshot) -> None:
        """Free the newest layer of a snapshot. Sandboxes that started from it keep it."""
        await self._channel.ask("Z", snapshot.layers[0])

    async def _undo(self, start: asyncio.Future[Message], number: int) -> None:
        """End a sandbox that nobody wants any more while it starts."""
        with suppress(SandboxError):
            os.close((await start)[3][0])
            await self.terminate(number)

    async def assign(self, number: int, spec: SandboxSpec) -> None:
        """Give a sandbox the labels of a spec, and its time to live from now."""
        await self._channel.ask("B", *_use(spec), number=number)

    async def terminate(self, number: int) -> None:
        """End a sandbox and wait until it is gone; several callers may, at once."""
        if number not in self._ending:
            self._ending[number] = asyncio.create_task(self._end(number))
        await asyncio.shield(self._ending[number])

    async def _end(self, number: int) -> None:
        try:
            with suppress(SandboxError):
                await self._channel.ask("T", number=number)
        finally:
            self._live.pop(number, None)
            del self._ending[number]

    def _event(self, message: Message) -> None:
        if message[0] == "X" and (sandbox := self._live.pop(message[1], None)):
            sandbox.died()

    async def close(self) -> None:
        """End the sandboxes, and the server if it was started here."""
        if self.server is None:
            for number in list(self._live):
                await self.terminate(number)
        self._channel.close()
        if self.server:
            await asyncio.to_thread(self.server.close)
        self._forget_all()

    def _forget_all(self) -> None:
        while self._live:
            self._live.popitem()[1].died()


@dataclass(frozen=True, slots=True)
class SandboxTicket:
    """Names a live sandbox to another client of the same server."""

    number: int
    name: str
    pid: int
    spec: SandboxSpec
    layers: tuple[str, ...]


class NamespaceSandbox(ResidentSandbox):
    """A sandbox of this host."""

    def __init__(self, host: NamespaceHost, ticket: SandboxTicket, descriptor: int) -> None:
        self.ticket = ticket
        self.pid = ticket.pid
        """Its first process, on the host."""
        self._host = host
        channel = SocketChannel(socket.socket(fileno=descriptor), f"sandbox {ticket.name}")
        super().__init__(ticket.spec, channel)

    def _memory_kills(self) -> int:
        return memory_kills(self.ticket.name)

    async def _keep(self, number: int, output_bytes: int, ends: Ends) -> None:
        await self._host.keep(self.ticket, number, output_bytes, ends.fds)

    async def snapshot(self) -> FileSnapshot:
        answer = await self._channel.ask("N")
        layer = await self._host.add_layer(answer[3][0])
        self.ticket = replace(self.ticket, layers=(layer, *self.ticket.layers))
        return FileSnapshot(self.ticket.layers, self.spec)

    async def serve(self, port: int, handler: Handler) -> asyncio.Server:
        listening = socket.socket(fileno=(await self._channel.ask("L", port))[3][0])
        listening.setblocking(False)
        return await asyncio.start_server(handler, sock=listening)

    async def assign(self, spec: SandboxSpec) -> None:
        await self._host.assign(self.ticket.number, spec)
        self.spec = spec
        self.ticket = replace(self.ticket, spec=spec)

    async def stop(self) -> None:
        await self._host.terminate(self.ticket.number)
        self.died()


def _opened(shared: str | None) -> tuple[SandboxServer | None, socket.socket]:
    """A server, if it is this process's own, and a connection; leftovers on this host are gone."""
    if removed := reap():
        logger.warning("removed what sandboxes of dead processes had left: %s", ", ".join(removed))
    if shared is not None:
        return None, connected_to_shared(shared)
    server = SandboxServer()
    return server, connected(server.address)


def _use(spec: SandboxSpec) -> list[str | int]:
    """Fields that say what a sandbox is for, and how long."""
    labels = json.dumps(dict(spec.labels))
    if len(labels) > MOST_LABELS:
        raise ValueError(f"the labels of a sandbox have {len(labels)} bytes; at most {MOST_LABELS} fit")
    return [round((spec.seconds_to_live or 0) * 1000), labels]

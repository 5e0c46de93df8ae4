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
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from goaly.sandboxes.contract import Entry, FileSnapshot, SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.control_groups import groups_of, memory_kills
from goaly.sandboxes.files import entries_of, stream_of
from goaly.sandboxes.process import Process
from goaly.sandboxes.sandbox import Handler, Sandbox, SandboxHost
from goaly.sandboxes.server import Channel, Message, SandboxServer, connected, connected_to_shared

OPEN_FILES = 4096
PREFIX = "goaly-"
"""Control groups of sandboxes begin so."""


class NamespaceHost(SandboxHost):
    """A client of a server of sandboxes on this host."""

    def __init__(self, channel: Channel, server: SandboxServer | None, number: int) -> None:
        self.server = server
        self._channel = channel
        self._roots: dict[Path, str] = {}
        self._live: dict[int, NamespaceSandbox] = {}
        self._number = number
        """Among the clients of the server; it makes names and ids unique there."""
        self._names = itertools.count(1)
        channel.on_event = self._event

    @classmethod
    async def open(cls, shared: str | None = None) -> Self:
        """A host with a server of its own, which ends with this object, or with one that processes share by a name."""
        if shared is None:
            server = await asyncio.to_thread(SandboxServer)  # it may compile
            connection = await asyncio.to_thread(connected, server.address)
        else:
            server, connection = None, await asyncio.to_thread(connected_to_shared, shared)
        channel = Channel(connection, "the server of sandboxes")
        return cls(channel, server, int((await channel.ask("H"))[2][0]))

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> NamespaceSandbox:
        """A sandbox in the state of its root, or of a snapshot."""
        layers = list(origin.layers) if origin else [await self._root(spec.root)]
        unique = next(self._names)
        number = (self._number << 20 | unique & 0xFFFFF) & 0xFFFFFFFF
        name = f"{PREFIX}{os.getpid()}-{self._number}-{unique}"
        limits = spec.limits
        fields = [name, limits.disk_mib << 20, limits.files, spec.seconds_unowned, int(spec.debuggers)]
        hidden = () if origin else spec.hidden_folders
        fields += [len(layers), *layers, len(hidden), *hidden]
        try:
            answer = await self._channel.ask("S", *fields, *groups_of(name, limits), number=number)
        except SandboxError as error:
            raise SandboxUnavailable(f"a sandbox did not start: {error}") from error
        sandbox = NamespaceSandbox(
            self, SandboxTicket(number, name, int(answer[2][0]), spec, tuple(layers)), answer[3][0]
        )
        self._live[number] = sandbox
        try:
            await sandbox.ready()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def adopt(self, ticket: SandboxTicket) -> NamespaceSandbox:
        """Take over a sandbox of another client, with its files and background processes as they are."""
        answer = await self._channel.ask("A", number=ticket.number)
        sandbox = NamespaceSandbox(self, ticket, answer[3][0])
        self._live[ticket.number] = sandbox
        return sandbox

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

    async def terminate(self, number: int) -> None:
        """End a sandbox and wait until it is gone."""
        with suppress(SandboxError):
            await self._channel.ask("T", number=number)
        self._live.pop(number, None)

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


class NamespaceSandbox(Sandbox):
    """A sandbox of this host."""

    def __init__(self, host: NamespaceHost, ticket: SandboxTicket, descriptor: int) -> None:
        self.ticket = ticket
        self.spec = ticket.spec
        self.pid = ticket.pid
        """Its first process, on the host."""
        self._host = host
        self._processes: dict[int, Process] = {}
        self._kills = memory_kills(ticket.name)
        self._channel = Channel(socket.socket(fileno=descriptor), f"sandbox {ticket.name}")
        self._channel.on_event = self._event
        self._channel.on_close = self.died

    async def ready(self) -> None:
        """Wait until commands can run."""
        message = await self._channel.expect(0)
        if message[0] == "E":
            raise SandboxUnavailable(f"a sandbox did not start: {message[2][0]}")

    async def _start(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        cwd: str,
        user: int,
        output_bytes: int,
        extra_pipes: int,
    ) -> Process:
        largest = self.spec.limits.file_mib << 20
        limits = [resource.RLIMIT_CORE, 0, resource.RLIMIT_FSIZE, largest, resource.RLIMIT_NOFILE, OPEN_FILES]
        ours, theirs = [], []
        for theirs_reads in (True, False, False, *(index == 0 for index in range(extra_pipes))):
            reader, writer = os.pipe()
            ours.append(writer if theirs_reads else reader)
            theirs.append(reader if theirs_reads else writer)
        fields = [user, user, cwd, len(limits) // 2, *limits, len(words), *words]
        fields += [f"{key}={value}" for key, value in variables.items()]
        return self._begin("R", fields, ours, theirs, output_bytes)

    async def _kill(self, number: int, signal_number: int, keep: Sequence[int] | None) -> None:
        fields = ["group"] if keep is None else ["session", *keep]
        with suppress(SandboxDied):
            await self._channel.ask("K", number, signal_number, *fields)

    def _killed_for_memory(self) -> bool:
        before, self._kills = self._kills, memory_kills(self.ticket.name)
        return self._kills > before

    async def upload(self, entries: Sequence[Entry], to: str, *, user: int | None = None) -> None:
        reader, writer = os.pipe()
        process = self._move_files("W", to, user, reader, (writer, _empty()), 1)
        try:
            for part in stream_of(entries):
                await process.write(part)
            process.close_stdin()
            await process.ended
        finally:
            process.close()

    async def download(self, path: str, *, most_bytes: int = 1 << 28, user: int | None = None) -> list[Entry]:
        reader, writer = os.pipe()
        process = self._move_files("G", path, user, writer, (os.open(os.devnull, os.O_WRONLY), reader), 2 * most_bytes)
        try:
            await process.ended
            process.stdout.drain()
            output = process.stdout.taken()
        finally:
            process.close()
        if output.omitted or len(output.head) + len(output.tail) > most_bytes:
            raise ValueError(f"{path} has more than {most_bytes} bytes")
        return entries_of(output.head + output.tail)

    def _move_files(
        self, op: str, path: str, user: int | None, theirs: int, ours: tuple[int, int], most: int
    ) -> Process:
        user = self.spec.user if user is None else user
        return self._begin(op, [user, user, path], (*ours, _empty()), [theirs], most)

    def _begin(
        self, op: str, fields: Sequence[str | int], ours: Sequence[int], theirs: list[int], most: int
    ) -> Process:
        """Ask for a process. `ours` are its pipes on this side; `theirs` are closed here."""
        number = self._channel.new_id()
        process = Process.of_pipes(
            *ours[:3],
            output_bytes=most,
            kill=lambda signal_number, keep: self._kill(number, signal_number, keep),
            out_of_memory=self._killed_for_memory,
            extra=ours[3:],
        )
        self._processes[number] = process
        try:
            self._channel.send(op, number, *fields, fds=theirs)
        except BaseException:
            del self._processes[number]
            process.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return process

    async def snapshot(self) -> FileSnapshot:
        answer = await self._channel.ask("N")
        layer = await self._host.add_layer(answer[3][0])
        self.ticket = replace(self.ticket, layers=(layer, *self.ticket.layers))
        return FileSnapshot(self.ticket.layers, self.spec)

    async def serve(self, port: int, handler: Handler) -> asyncio.Server:
        listening = socket.socket(fileno=(await self._channel.ask("L", port))[3][0])
        listening.setblocking(False)
        return await asyncio.start_server(handler, sock=listening)

    def alive(self) -> bool:
        return not self._channel.closed

    async def stop(self) -> None:
        await self._host.terminate(self.ticket.number)
        self.died()

    def died(self) -> None:
        """Its commands end with SandboxDied."""
        self._channel.on_close = lambda: None
        self._channel.close()
        for process in self._processes.values():
            if not process.ended.done():
                process.ended.set_exception(SandboxDied(f"sandbox {self.ticket.name} has ended"))
                process.ended.exception()
        self._processes.clear()
        self.ended()

    def _event(self, message: Message) -> None:
        op, number, fields, _ = message
        process = self._processes.get(number)
        if process is None:
            return
        if op == "F" and not process.ended.done():
            process.ended.set_exception(OSError(int(fields[0]), os.strerror(int(fields[0])), fields[1]))
            process.ended.exception()
        elif op == "X":
            del self._processes[number]
            if not process.ended.done():
                process.ended.set_result(int(fields[0]))


def _empty() -> int:
    """A pipe from which nothing comes."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader

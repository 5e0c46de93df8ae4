"""A client's connection to one server of sandboxes, which is made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from goaly.sandboxes.contract import SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.remote_http import connect
from goaly.sandboxes.remote_sandbox import VERSION, RemoteSandbox, RemoteTicket, spec_text
from goaly.sandboxes.remote_streams import copy_in, copy_out
from goaly.sandboxes.remote_wire import Answer, Wire, WireCall
from goaly.sandboxes.sandbox import Handler
from goaly.sandboxes.settings import RemoteSettings

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0
"""Seconds between two attempts to reach a server that is lost."""


class ServerLink:
    """One server. Its sandboxes live as long as the connection."""

    def __init__(self, url: str, settings: RemoteSettings, changed: Callable[[], None]) -> None:
        self.url = url
        self._settings = settings
        self._key = os.environ.get(settings.key_variable)
        self._tls = ssl.create_default_context(cafile=settings.ca) if url.startswith("https:") else None
        self._changed = changed
        self._wire: Wire | None = None
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self._handlers: dict[int, Handler] = {}
        self._load: Mapping[str, int] = {"alive": 0, "most": 1, "waiting": 0}
        self._starting = 0
        self._wanted = asyncio.Event()
        self._attempt: asyncio.Future[SandboxUnavailable | None] = asyncio.get_running_loop().create_future()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._wire is not None and self._wire.lost is None

    @property
    def has_room(self) -> bool:
        """As far as is known here."""
        return self._load["alive"] + self._load["waiting"] + self._starting < self._load["most"]

    @property
    def load(self) -> float:
        """Sandboxes that live, start or wait, in parts of those that may live."""
        return (self._load["alive"] + self._load["waiting"] + self._starting) / self._load["most"]

    @property
    def state(self) -> str:
        """In words."""
        if not self.connected:
            return f"{self.url} cannot be reached"
        return f"{self.url} has {self._load['alive']} of {self._load['most']} sandboxes, {self._load['waiting']} wait"

    async def reach(self) -> SandboxUnavailable | None:
        """Connect now, if it is not connected; the error if that failed."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name=f"sandboxes at {self.url}")
        if self.connected:
            return None
        self._wanted.set()
        return await asyncio.shield(self._attempt)

    async def start(self, spec: SandboxSpec, origin: str | None, *, wait: bool) -> RemoteSandbox:
        """A sandbox there. SandboxFull if there is no room and this start does not wait."""
        wire = self._connected_wire()
        self._starting += 1
        try:
            fields = await self._given(wire, "start", "stop", spec=spec_text(spec), origin=origin, wait=wait)
        finally:
            self._starting -= 1
        return self._taken(wire, RemoteTicket(self.url, fields["name"], spec))

    async def adopt(self, ticket: RemoteTicket) -> RemoteSandbox:
        """Take over a sandbox there."""
        wire = self._connected_wire()
        fields = await self._given(wire, "adopt", "release", name=ticket.name)
        sandbox = self._taken(wire, ticket)
        try:
            await sandbox.go_on_with(fields["kept"])
        except asyncio.CancelledError:
            if wire.lost is None:
                wire.call("release", sandbox=ticket.name)
            raise
        return sandbox

    async def _given(self, wire: Wire, op: str, undo: str, **fields: Any) -> Mapping[str, Any]:
        """A call's answer about the sandbox that it gave. A cancellation that comes too late calls `undo`."""
        call = wire.call(op, **fields)

        def give_back(answer: asyncio.Future[Answer]) -> None:
            if wire.lost is None and answer.exception() is None:
                wire.call(undo, sandbox=answer.result().fields["name"])

        try:
            async with call:
                return (await call.result()).fields
        except asyncio.CancelledError:
            call.answer.add_done_callback(give_back)
            raise

    async def forget(self, name: str) -> None:
        """Free a snapshot there, if the server still is."""
        if self.connected:
            with suppress(SandboxDied):
                await self._connected_wire().ask("forget", name=name)

    async def end_all(self) -> None:
        """End what this client has there."""
        if self.connected:
            with suppress(SandboxDied):
                await self._connected_wire().ask("close")

    async def leave(self) -> None:
        """End the connection."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    def _connected_wire(self) -> Wire:
        if self._wire is None or self._wire.lost is not None:
            raise SandboxDied(f"{self.url} cannot be reached")
        return self._wire

    def _taken(self, wire: Wire, ticket: RemoteTicket) -> RemoteSandbox:
        sandbox = self._sandboxes[ticket.name] = RemoteSandbox(wire, self._handlers, ticket)
        if wire.lost is not None:
            self._lost(wire.lost)
        return sandbox

    async def _keep(self) -> None:
        """Connect again and again, with longer and longer pauses."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._connect_once()
                pause = FIRST_PAUSE
            except (SandboxError, ValueError, OSError) as error:
                self._attempted(SandboxUnavailable(f"{self.url}: {error}"))
                pause = min(2 * pause, LONGEST_PAUSE)
            self._wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def _connect_once(self) -> None:
        """Connect, and stay until the connection is lost."""
        silent = self._settings.silent_seconds
        try:
            connected = await connect(self.url, self._key, self._tls, silent)
        except SandboxUnavailable as error:
            if str(error).startswith("401 "):
                raise SandboxUnavailable(f"{error}: set the variable {self._settings.key_variable} to one") from error
            raise
        wire = Wire(connected, self._serve, name=self.url, silent_seconds=silent, server=False)
        wire.on_notice, wire.on_lost = self._noticed, self._lost
        running = asyncio.create_task(wire.run())
        try:
            self._load = (await wire.ask("hello", version=VERSION)).fields
            self._wire = wire
            self._attempted(None)
            await asyncio.shield(running)
            logger.warning("%s", wire.lost)
        finally:
            wire.lose("this client has left")
            self._wire = None
            await asyncio.wait({running})
            await connected.close()

    def _attempted(self, error: SandboxUnavailable | None) -> None:
        attempt, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
        attempt.set_result(error)
        self._changed()

    def _noticed(self, fields: Mapping[str, Any]) -> None:
        if "load" in fields:
            self._load = fields["load"]
            self._changed()
        elif sandbox := self._sandboxes.pop(fields["lost"], None):
            sandbox.died(fields["why"])

    def _lost(self, why: str) -> None:
        while self._sandboxes:
            self._sandboxes.popitem()[1].died(why)
        self._changed()

    async def _serve(self, call: WireCall) -> Answer:
        """A connection from inside a sandbox, which its handler gets as one of this machine."""
        handler = self._handlers.get(call.fields["serve"]) if call.op == "connection" else None
        if handler is None:
            raise ConnectionRefusedError(f"nobody here serves the {call.op} {call.fields}")
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        our_reader, our_writer = await asyncio.open_connection(sock=ours)
        inward = asyncio.create_task(copy_in(call, our_writer))
        outward = asyncio.create_task(copy_out(our_reader, call))
        try:
            await handler(reader, writer)
            writer.close()
            await outward
        finally:
            for copying in (inward, outward):
                copying.cancel()
            writer.close()
            our_writer.close()
        return Answer({})

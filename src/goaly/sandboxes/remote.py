"""The backend `remote`: sandboxes of other machines, each of which runs `python -m apps.sandboxes.main`.

A sandbox and its snapshots stay at the server on which they began. A server that is lost takes its sandboxes with it:
their commands raise SandboxDied at once. New ones start at the others, and at that one again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self

from goaly.sandboxes.contract import (
    FileSnapshot,
    SandboxDied,
    SandboxFull,
    SandboxSpec,
    SandboxUnavailable,
    SnapshotLost,
)
from goaly.sandboxes.remote_link import ServerLink
from goaly.sandboxes.remote_sandbox import RemoteSandbox, RemoteSnapshot, RemoteTicket
from goaly.sandboxes.sandbox import SandboxHost
from goaly.sandboxes.settings import RemoteSettings

logger = logging.getLogger(__name__)


class RemoteHost(SandboxHost):
    """A client of one server or several."""

    slots = "remote-starts"

    def __init__(self, settings: RemoteSettings) -> None:
        self._start_seconds = settings.start_seconds
        self._changed = asyncio.Event()
        self._links = {url: ServerLink(url, settings, self._changed.set) for url in settings.urls}

    @classmethod
    async def open(cls, settings: RemoteSettings) -> Self:
        """A host with at least one server; SandboxUnavailable if none can be used."""
        host = cls(settings)
        found = await asyncio.gather(*(link.reach() for link in host._links.values()))
        errors = [str(error) for error in found if error is not None]
        if len(errors) == len(found):
            await host.leave()
            raise SandboxUnavailable("no server of sandboxes can be used: " + "; ".join(errors))
        for error in errors:
            logger.warning("a server of sandboxes is left out until it answers: %s", error)
        return host

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> RemoteSandbox:
        """A sandbox at the server that has the snapshot, or at the least loaded one that takes it."""
        if origin is None:
            return await self._within(self._anywhere(spec), list(self._links.values()))
        if not isinstance(origin, RemoteSnapshot):
            raise ValueError(f"the snapshot must be one of a server of sandboxes, not {origin}")
        link = self._link(origin.server)
        while (error := await link.reach()) is None:
            with suppress(SandboxDied):  # the server was lost: its snapshots may be there if it answers again
                return await self._within(link.start(spec, origin.layers[0], wait=True), [link])
        raise SnapshotLost(f"the server of the snapshot cannot be used: {error}")

    async def _within(self, starting: Coroutine[Any, Any, RemoteSandbox], links: Sequence[ServerLink]) -> RemoteSandbox:
        try:
            async with asyncio.timeout(self._start_seconds) as limit:
                return await starting
        except TimeoutError as error:
            if not limit.expired():
                raise
            states = "; ".join(link.state for link in links)
            raise SandboxFull(f"no place for a sandbox within {self._start_seconds:g} s: {states}") from error

    async def _anywhere(self, spec: SandboxSpec) -> RemoteSandbox:
        """A sandbox at the first server that has room, or at the one that will have some first."""
        refusals: dict[str, SandboxUnavailable] = {}
        while True:
            self._changed.clear()
            usable = [link for link in self._links.values() if link.connected and link.url not in refusals]
            usable.sort(key=lambda link: link.load)
            with_room = [link for link in usable if link.has_room]
            for link in with_room or usable[:1]:
                try:
                    return await link.start(spec, None, wait=not with_room)
                except SandboxFull:
                    continue
                except SandboxUnavailable as error:
                    refusals[link.url] = error
                except SandboxDied:
                    continue  # the server is lost: another one, or the same when it is back
            if len(refusals) == len(self._links):
                raise SandboxUnavailable("; ".join(f"{url}: {error}" for url, error in refusals.items()))
            if not usable:
                await self._changed.wait()  # unblocked by a server that connects, or by the time limit

    def _link(self, url: str) -> ServerLink:
        if url not in self._links:
            raise ValueError(f"{url} is none of this client's servers: {', '.join(self._links)}")
        return self._links[url]

    async def adopt(self, ticket: RemoteTicket) -> RemoteSandbox:
        """Take over a sandbox that another client has left, or that this one lost with its connection."""
        link = self._link(ticket.server)
        if (error := await link.reach()) is not None:
            raise SandboxDied(f"the server of sandbox {ticket.name} cannot be used: {error}")
        return await link.adopt(ticket)

    async def forget(self, snapshot: FileSnapshot) -> None:
        """Free a snapshot. Sandboxes that started from it keep it."""
        if isinstance(snapshot, RemoteSnapshot):
            await self._link(snapshot.server).forget(snapshot.layers[0])

    async def leave(self) -> None:
        """Go without ending the sandboxes."""
        await asyncio.gather(*(link.leave() for link in self._links.values()))

    async def close(self) -> None:
        """End the sandboxes, and free the snapshots that no other client uses."""
        await asyncio.gather(*(link.end_all() for link in self._links.values()))
        await self.leave()

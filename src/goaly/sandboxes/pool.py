"""A host of sandboxes that bounds how many live, starts them at a pace, and keeps some ready.

    pool = SandboxPool(host, settings.pool)
    sandbox = await pool.start(spec)  # waits for its turn; one that is ready is given at once

A holder of a sandbox that starts another one before it stops the first can wait for ever, if all others do the same:
stop the first, or raise `most`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from goaly.sandboxes.admission import Admission, RoomRequest
from goaly.sandboxes.contract import FileSnapshot, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.server import runtime_folder
from goaly.sandboxes.settings import PoolSettings
from goaly.sandboxes.start_slots import StartSlots

logger = logging.getLogger(__name__)

TASK = "task"
"""The label by which starts take turns."""
END_SECONDS = 30.0
"""Longest wait for warm sandboxes to end, before their host ends them."""
RUN = "run"
"""The label that a warm sandbox has already."""


@dataclass(eq=False, slots=True)
class WarmState:
    """A state in which sandboxes begin, and those that wait ready in it."""

    spec: SandboxSpec
    origin: FileSnapshot | None
    ready: deque[Sandbox] = field(default_factory=deque)
    starting: int = 0


@dataclass(eq=False, slots=True)
class StartRequest(RoomRequest):
    """A start that waits for room, or for a warm sandbox."""

    state: WarmState
    granted: asyncio.Future[Sandbox | None]
    """None: there is room."""


class SandboxPool(SandboxHost):
    """Sandboxes of another host, within bounds. It closes that host, too."""

    def __init__(self, host: SandboxHost, settings: PoolSettings) -> None:
        self._host = host
        self._settings = settings
        memory, disk = (None if gib is None else gib * 1024 for gib in (settings.memory_gib, settings.disk_gib))
        self._admission = Admission(settings.most, memory, disk)
        self._slots = StartSlots(runtime_folder() / host.slots, settings.starts_at_once)
        self._states: list[WarmState] = []
        """Those asked for lately, the last one last."""
        self._live: dict[Sandbox, RoomRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._evicted: Sandbox | None = None
        """A warm sandbox that is ending, to make room."""
        self._closed = False

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> Sandbox:
        """A sandbox in the state of its root, or of a snapshot, when it is the turn of its task and there is room."""
        if self._closed:
            raise SandboxUnavailable("the pool of sandboxes is closed")
        if reason := self._admission.too_large(spec.limits):
            raise SandboxUnavailable(f"a sandbox can never start: {reason}")
        state = self._used(spec, origin)
        while True:
            request = StartRequest(
                spec.labels.get(TASK, ""), spec.limits, state, asyncio.get_running_loop().create_future()
            )
            warm = await self._granted(request)
            sandbox = await self._assigned(warm, spec) if warm else await self._begun(request, spec, origin)
            self._keep_warm()
            if sandbox:
                return sandbox

    async def _assigned(self, warm: Sandbox, spec: SandboxSpec) -> Sandbox | None:
        """A warm sandbox as one of this spec; None if it has died."""
        try:
            await warm.assign(spec)
        except BaseException as error:
            self._spawn(self._end(warm))
            if isinstance(error, SandboxError):
                return None
            raise
        return warm

    def _used(self, spec: SandboxSpec, origin: FileSnapshot | None) -> WarmState:
        """The state of a start, which is now the one that was used last."""
        spec = replace(spec, labels={RUN: spec.labels[RUN]} if RUN in spec.labels else {})
        state = next(
            (one for one in self._states if one.spec == spec and one.origin == origin), WarmState(spec, origin)
        )
        if state in self._states:
            self._states.remove(state)
        self._states.append(state)
        for old in self._states[: -self._settings.warm_states]:
            self._drop(old)
        return state

    def _drop(self, state: WarmState) -> None:
        self._states.remove(state)
        while sandbox := self._ready(state):
            self._spawn(self._end(sandbox))

    def _ready(self, state: WarmState) -> Sandbox | None:
        """A warm sandbox that lives."""
        while state.ready:
            sandbox = state.ready.popleft()
            if sandbox.alive():
                return sandbox
            self._ended(sandbox)
        return None

    async def _granted(self, request: StartRequest) -> Sandbox | None:
        """Wait for a warm sandbox, or for room (None)."""
        self._admission.ask(request)
        self._admit()
        try:
            return await request.granted
        except BaseException:
            self._admission.withdraw(request)
            self._admission.free(request)
            given = request.granted
            if given.done() and not given.cancelled() and not given.exception() and (warm := given.result()):
                self._spawn(self._end(warm))
            self._admit()
            raise

    def _admit(self) -> None:
        """Serve those whose turn it is, until one has to wait; a warm sandbox of another state ends for it."""
        while isinstance(request := self._admission.next, StartRequest):
            if request.granted.done():  # cancelled a moment ago
                self._admission.withdraw(request)
            elif warm := self._ready(request.state):
                self._admission.serve(request)
                request.granted.set_result(warm)
            elif self._admission.admit():
                request.granted.set_result(None)
            else:
                self._evict()
                return

    def _evict(self) -> None:
        """End the warm sandbox that is needed least, unless one is ending."""
        if self._evicted is None:
            self._evicted = next((sandbox for state in self._states if (sandbox := self._ready(state))), None)
            if self._evicted:
                self._spawn(self._end(self._evicted))

    async def _end(self, sandbox: Sandbox) -> None:
        """Stop a sandbox that nobody has; its room is free then."""
        try:
            await sandbox.stop()
        except SandboxError as error:
            logger.warning("a sandbox did not end: %s", error)
        finally:
            self._ended(sandbox)

    async def _begun(self, request: RoomRequest, spec: SandboxSpec, origin: FileSnapshot | None) -> Sandbox:
        """A sandbox that starts now, in the room of a request, which is free again if it does not."""
        try:
            async with self._slots.one():
                start = self._spawn(self._host.start(spec, origin=origin))
                try:
                    done, _ = await asyncio.wait({start}, timeout=self._settings.start_seconds)
                except asyncio.CancelledError:
                    await asyncio.wait({self._spawn(self._abandon(start))}, timeout=self._settings.start_seconds)
                    raise
            if not done:
                self._spawn(self._abandon(start))
                seconds = self._settings.start_seconds
                raise SandboxUnavailable(f"a sandbox did not start within {seconds:g} s (sandbox.pool.start_seconds)")
            sandbox = start.result()
        except BaseException:
            self._admission.free(request)
            self._admit()
            raise
        self._hold(sandbox, request)
        return sandbox

    def _hold(self, sandbox: Sandbox, request: RoomRequest) -> None:
        """Keep a sandbox's room until it has ended."""
        self._live[sandbox] = request
        sandbox.when_ended(lambda: self._ended(sandbox))

    def _ended(self, sandbox: Sandbox) -> None:
        if sandbox is self._evicted:
            self._evicted = None
        if request := self._live.pop(sandbox, None):
            self._admission.free(request)
            self._admit()

    def _keep_warm(self) -> None:
        """Start what is missing of warm sandboxes, where there is room that nobody waits for."""
        for state in reversed(self._states):
            while len(state.ready) + state.starting < self._settings.warm and not self._closed:
                request = RoomRequest("", state.spec.limits)
                if not self._admission.try_hold(request):
                    return
                state.starting += 1
                self._spawn(self._warmed(state, request))

    async def _warmed(self, state: WarmState, request: RoomRequest) -> None:
        try:
            sandbox = await self._begun(request, replace(state.spec, seconds_to_live=None), state.origin)
        except SandboxError as error:
            logger.warning("no warm sandbox: %s", error)
            return
        finally:
            state.starting -= 1
        if state in self._states and not self._closed:
            state.ready.append(sandbox)
        else:
            self._spawn(self._end(sandbox))
        self._admit()

    async def _abandon(self, start: asyncio.Task[Sandbox]) -> None:
        """Cancel a start, and end the sandbox if there is one nevertheless."""
        start.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await (await start).stop()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run in the background, to the end at the latest of `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def alive(self) -> bool:
        return self._host.alive()

    async def adopt(self, ticket: Any) -> Sandbox:
        """Take over a sandbox of another process; it lives already, so it does not wait for room."""
        sandbox = await self._host.adopt(ticket)
        request = RoomRequest(sandbox.spec.labels.get(TASK, ""), sandbox.spec.limits)
        self._admission.hold(request)
        self._hold(sandbox, request)
        return sandbox

    async def leave(self) -> None:
        """Go without ending the sandboxes that somebody has."""
        await self._end_own()
        await self._host.leave()

    async def forget(self, snapshot: FileSnapshot) -> None:
        """Free the newest layer of a snapshot, and end the warm sandboxes in its state."""
        for state in [one for one in self._states if one.origin == snapshot]:
            self._drop(state)
        await self._host.forget(snapshot)

    async def close(self) -> None:
        """End the sandboxes and the host."""
        try:
            await self._end_own()
        finally:
            await self._host.close()

    async def _end_own(self) -> None:
        """End what waits and what nobody has."""
        self._closed = True
        while isinstance(request := self._admission.next, StartRequest):
            self._admission.withdraw(request)
            request.granted.set_exception(SandboxUnavailable("the pool of sandboxes is closed"))
        for state in list(self._states):
            self._drop(state)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_SECONDS)
        self._slots.close()

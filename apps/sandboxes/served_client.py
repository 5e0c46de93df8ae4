"""One client of a server of sandboxes, and what it may call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from apps.sandboxes.served_process import ServedProcess
from apps.sandboxes.service import HeldSandbox, SandboxService
from goaly.sandboxes.command import Process
from goaly.sandboxes.contract import Entry, SandboxDied
from goaly.sandboxes.files import EntryReader, stream_of
from goaly.sandboxes.remote_sandbox import STDIN, VERSION, result_answer, spec_of
from goaly.sandboxes.remote_streams import (
    copy_in,
    copy_out,
    in_parts,
)
from goaly.sandboxes.remote_wire import READY, Answer, BinarySocket, Wire, WireCall

MOST_OUTPUT = 64 << 20
"""Most bytes of a stream that this server keeps for a client."""
MOST_DOWNLOAD = 1 << 30
BATCH = 8 << 20
"""Bytes of an upload that go into a sandbox together."""


class ServedClient:
    """Answers the calls of one client."""

    def __init__(self, service: SandboxService, socket: BinarySocket, silent_seconds: float) -> None:
        self.wire = Wire(socket, self._serve, name="the client", silent_seconds=silent_seconds, server=True)
        self.name = secrets.token_hex(8)
        self._service = service
        self._processes: dict[int, ServedProcess] = {}
        self._of_client: dict[str, Callable[[WireCall], Awaitable[Answer]]] = {
            "hello": self._hello,
            "start": self._start,
            "adopt": self._adopt,
            "forget": self._forget,
            "kill": self._kill,
            "close": self._close,
        }
        self._of_sandbox: dict[str, Callable[[HeldSandbox, WireCall], Awaitable[Answer]]] = {
            "assign": self._assign,
            "run": self._run,
            "process": self._process,
            "keep": self._keep,
            "upload": self._upload,
            "download": self._download,
            "snapshot": self._snapshot,
            "serve": self._listen,
            "stop": self._stop,
            "release": self._release,
        }

    async def run(self) -> None:
        """Serve this client until its connection is lost."""
        self._service.came(self)
        try:
            await self.wire.run()
        finally:
            self._service.left(self)

    def loses(self, name: str, why: str) -> None:
        self.wire.notify(lost=name, why=why)

    def told(self, load: Mapping[str, Any]) -> None:
        self.wire.notify(load=load)

    async def _serve(self, call: WireCall) -> Answer:
        if answer := self._of_client.get(call.op):
            return await answer(call)
        if call.op not in self._of_sandbox:
            raise ValueError(f"this server does not know the call {call.op!r}")
        held = self._service.held(call.fields["sandbox"])
        if held.owner is not self:
            raise SandboxDied(f"sandbox {held.name} is another client's")
        task = asyncio.current_task()
        assert task is not None
        held.calls.add(task)
        try:
            return await self._of_sandbox[call.op](held, call)
        finally:
            held.calls.discard(task)

    async def _hello(self, call: WireCall) -> Answer:
        if call.fields["version"] != VERSION:
            raise ValueError(f"this server speaks version {VERSION}, and its client {call.fields['version']}")
        return Answer(self._service.load())

    async def _start(self, call: WireCall) -> Answer:
        spec, origin = spec_of(call.fields["spec"]), call.fields["origin"]
        held = await self._service.start(self, spec, origin, wait=call.fields["wait"])
        return Answer({"name": held.name})

    async def _adopt(self, call: WireCall) -> Answer:
        held = await self._service.adopt(self, call.fields["name"])
        return Answer({"name": held.name, "kept": None if held.kept is None else held.kept.shape})

    async def _forget(self, call: WireCall) -> Answer:
        self._service.forget(call.fields["name"])
        return Answer({})

    async def _close(self, call: WireCall) -> Answer:
        await self._service.end_all_of(self)
        return Answer({})

    async def _assign(self, held: HeldSandbox, call: WireCall) -> Answer:
        await held.sandbox.assign(spec_of(call.fields["spec"]))
        return Answer({})

    async def _stop(self, held: HeldSandbox, call: WireCall) -> Answer:
        await self._service.end(held)
        return Answer({})

    async def _release(self, held: HeldSandbox, call: WireCall) -> Answer:
        self._service.release(self, held)
        return Answer({})

    async def _snapshot(self, held: HeldSandbox, call: WireCall) -> Answer:
        return Answer({"name": await self._service.snapshot(self, held)})

    async def _begun(self, held: HeldSandbox, call: WireCall, **more: int) -> Process:
        given = call.fields
        return await held.sandbox.start(
            given["command"], cwd=given["cwd"], env=given["env"], user=given["user"], **more
        )

    async def _run(self, held: HeldSandbox, call: WireCall) -> Answer:
        most, seconds = int(call.fields["output_bytes"]), float(call.fields["seconds"])
        if most > MOST_OUTPUT:
            raise ValueError(f"output_bytes={most}: must be at most {MOST_OUTPUT}; write to a file and download it")
        process = await self._begun(held, call, output_bytes=most)
        stdin = call.bytes_of(STDIN) if call.fields["stdin"] else b""
        return result_answer(await process.communicate(stdin, seconds))

    async def _process(self, held: HeldSandbox, call: WireCall) -> Answer:
        if call.fields["kept"]:
            served = held.kept
            if served is None or served.has_client:
                raise ValueError(f"sandbox {held.name} has no command that was kept for an adopter")
        else:
            shape = {name: int(call.fields[name]) for name in ("output_bytes", "extra_pipes")}
            process = await self._begun(held, call, output_bytes=1, extra_pipes=shape["extra_pipes"])
            served = ServedProcess(process, shape)
        self._processes[call.number] = served
        try:
            return await served.serve(call)
        except asyncio.CancelledError:
            if self.wire.lost is None and held.owner is self:
                await served.process.kill()
            raise
        finally:
            del self._processes[call.number]
            if held.kept is not served:
                served.process.close()

    async def _keep(self, held: HeldSandbox, call: WireCall) -> Answer:
        if served := self._processes.get(call.fields["call"]):
            held.keep(served)
        return Answer({})

    async def _kill(self, call: WireCall) -> Answer:
        if served := self._processes.get(call.fields["call"]):
            number, keep = call.fields["signal"], call.fields["keep"]
            await (served.process.kill(number) if keep is None else served.process.kill_session(keep, number))
        return Answer({})

    async def _upload(self, held: HeldSandbox, call: WireCall) -> Answer:
        to, user, reader = call.fields["to"], call.fields["user"], EntryReader()
        batch: list[Entry] = []
        size = 0
        async for data in call.bytes_of(0):
            for entry in reader.feed(data):
                batch.append(entry)
                size += len(entry.contents)
            if size >= BATCH:
                await held.sandbox.upload(batch, to, user=user)
                batch, size = [], 0
        reader.end()
        await held.sandbox.upload(batch, to, user=user)
        return Answer({})

    async def _download(self, held: HeldSandbox, call: WireCall) -> Answer:
        path, user, most = call.fields["path"], call.fields["user"], int(call.fields["most_bytes"])
        entries = await held.sandbox.download(path, most_bytes=min(most, MOST_DOWNLOAD), user=user)
        for part in in_parts(stream_of(entries)):
            await call.send(0, part)
        return Answer({})

    async def _listen(self, held: HeldSandbox, call: WireCall) -> Answer:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            copying = None
            try:
                with suppress(SandboxDied):
                    async with self.wire.call("connection", serve=call.number) as connection:
                        copying = asyncio.create_task(copy_out(reader, connection))
                        await copy_in(connection, writer)
                        await connection.result()
            finally:
                if copying is not None:
                    copying.cancel()
                writer.close()

        server = await held.sandbox.serve(int(call.fields["port"]), connect)
        try:
            await call.send(READY, b"listens")
            await held.gone.wait()  # or the client closes the port, and cancels this
            raise SandboxDied(f"sandbox {held.name} has ended")
        finally:
            server.close()

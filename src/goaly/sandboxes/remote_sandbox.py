"""A sandbox of another machine, as its client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from goaly.sandboxes.command import Process
from goaly.sandboxes.contract import (
    CommandResult,
    Entry,
    FileSnapshot,
    Limit,
    Output,
    Program,
    SandboxDied,
    SandboxError,
    SandboxSpec,
)
from goaly.sandboxes.files import EntryReader, stream_of
from goaly.sandboxes.remote_streams import RemoteInlet, RemoteOutlet, RemoteStream, send_all
from goaly.sandboxes.remote_wire import READY, Answer, Wire, WireCall
from goaly.sandboxes.sandbox import Handler, Sandbox

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION = 1
"""Of the protocol between server and client."""
STDIN, STDOUT, STDERR, EXTRA = 0, 1, 2, 3
"""Pipes of a command's call."""


@dataclass(frozen=True, slots=True)
class RemoteTicket:
    """Names a live sandbox of a server to another client of it."""

    server: str
    name: str
    spec: SandboxSpec


@dataclass(frozen=True, slots=True)
class RemoteSnapshot(FileSnapshot):
    """A snapshot that is at one of the servers. Its only layer is its name there."""

    server: str = ""


@cache
def _spec_adapter() -> TypeAdapter[SandboxSpec]:
    from pydantic import TypeAdapter

    return TypeAdapter(SandboxSpec)


def spec_text(spec: SandboxSpec) -> str:
    """A spec as text that crosses."""
    return _spec_adapter().dump_json(spec).decode()


def spec_of(text: str) -> SandboxSpec:
    """The spec that crossed; ValueError if it is none."""
    return _spec_adapter().validate_json(text)


def result_answer(result: CommandResult) -> Answer:
    """A command's end as an answer that crosses."""
    streams = (result.stdout, result.stderr)
    parts = [part for stream in streams for part in (stream.head, stream.tail)]
    fields = {
        "exit_code": result.exit_code,
        "seconds": result.seconds,
        "limit": result.limit,
        "sizes": [len(part) for part in parts],
        "omitted": [stream.omitted for stream in streams],
    }
    return Answer(fields, b"".join(parts))


def result_of(answer: Answer) -> CommandResult:
    """The command's end that crossed."""
    fields, parts, at = answer.fields, [], 0
    for size in fields["sizes"]:
        parts.append(answer.blob[at : at + size])
        at += size
    omitted = fields["omitted"]
    return CommandResult(
        exit_code=fields["exit_code"],
        stdout=Output(parts[0], parts[1], omitted[0]),
        stderr=Output(parts[2], parts[3], omitted[1]),
        seconds=fields["seconds"],
        limit=Limit(fields["limit"]) if fields["limit"] else None,
    )


class RemoteProcess(Process):
    """A command of a sandbox of a server."""

    call_number = 0


class RemoteSandbox(Sandbox):
    """A sandbox of a server. It died for its client if the connection was lost; the client can adopt it again."""

    variables: Mapping[str, str] = MappingProxyType({})  # the server knows them

    def __init__(self, wire: Wire, handlers: dict[int, Handler], ticket: RemoteTicket) -> None:
        self.spec = ticket.spec
        self.ticket = ticket
        self._wire = wire
        self._handlers = handlers
        """Of connections from inside, by the number of the call that listens."""
        self._why_ended: str | None = None

    async def _ask(self, op: str, **fields: Any) -> Answer:
        async with self._call(op, **fields) as call:
            return await call.result()

    def _call(self, op: str, **fields: Any) -> WireCall:
        if self._why_ended is not None:
            raise SandboxDied(self._why_ended)
        return self._wire.call(op, sandbox=self.ticket.name, **fields)

    async def assign(self, spec: SandboxSpec) -> None:
        await self._ask("assign", spec=spec_text(spec))
        self.spec = spec
        self.ticket = RemoteTicket(self.ticket.server, self.ticket.name, spec)

    async def _run(self, program: Program, stdin: bytes, seconds: float) -> CommandResult:
        async with self._call("run", **_crossing(program), seconds=seconds, stdin=bool(stdin)) as call:
            if stdin:
                await send_all(call, [stdin])
            return result_of(await call.result())

    async def _start(self, program: Program) -> Process:
        call = self._call("process", **_crossing(program), extra_pipes=program.extra_pipes, kept=False)
        return await self._connected(call, program.output_bytes, program.extra_pipes)

    async def _connected(self, call: WireCall, output_bytes: int, extra_pipes: int) -> RemoteProcess:
        """The command that a call has started."""
        stdout, stderr = RemoteStream(call, STDOUT, output_bytes), RemoteStream(call, STDERR, output_bytes)
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        was_memory = False

        def end(answer: asyncio.Future[Answer]) -> None:
            nonlocal was_memory
            if error := answer.exception():
                ended.set_exception(error)
                ended.exception()  # nobody may be left who asks for it
            else:
                was_memory = answer.result().fields["memory"]
                ended.set_result(answer.result().fields["code"])
            stdout.close()
            stderr.close()

        async def kill(number: int, keep: Sequence[int] | None) -> None:
            with suppress(SandboxDied):
                await self._ask("kill", call=call.number, signal=number, keep=None if keep is None else list(keep))

        try:
            await call.receive(READY)
        except BaseException:
            await call.__aexit__()
            raise
        call.answer.add_done_callback(end)
        process = RemoteProcess(
            RemoteOutlet(call, STDIN),
            stdout,
            stderr,
            ended=ended,
            kill=kill,
            out_of_memory=lambda: was_memory,
            extra_input=RemoteOutlet(call, EXTRA) if extra_pipes else None,
            extra_outputs=[RemoteInlet(call, EXTRA + index) for index in range(1, extra_pipes)],
        )
        process.call_number = call.number
        return process

    async def keep(self, process: Process) -> None:
        if isinstance(process, RemoteProcess):
            await self._ask("keep", call=process.call_number)

    async def go_on_with(self, kept: Mapping[str, int] | None) -> None:
        """Connect with the command that the earlier owner kept, if there is one."""
        if kept is not None:
            call = self._call("process", kept=True)
            with suppress(ValueError):  # this client has it already
                self._kept = await self._connected(call, kept["output_bytes"], kept["extra_pipes"])

    async def upload(self, entries: Sequence[Entry], to: str, *, user: int | None = None) -> None:
        async with self._call("upload", to=to, user=user) as call:
            await send_all(call, stream_of(entries))
            await call.result()

    async def download(self, path: str, *, most_bytes: int = 1 << 28, user: int | None = None) -> list[Entry]:
        reader, entries = EntryReader(), []
        async with self._call("download", path=path, most_bytes=most_bytes, user=user) as call:
            async for data in call.bytes_of(0):
                entries += reader.feed(data)
            await call.result()
        reader.end()
        return entries

    async def snapshot(self) -> RemoteSnapshot:
        answer = await self._ask("snapshot")
        return RemoteSnapshot((answer.fields["name"],), self.spec, self.ticket.server)

    async def serve(self, port: int, handler: Handler) -> RemotePort:
        call = self._call("serve", port=port)
        self._handlers[call.number] = handler
        call.answer.add_done_callback(lambda answer: self._handlers.pop(call.number, None))
        try:
            await call.receive(READY)
        except BaseException:
            await call.__aexit__()
            raise
        return RemotePort(call)

    def alive(self) -> bool:
        return self._why_ended is None and self._wire.lost is None

    async def stop(self) -> None:
        with suppress(SandboxError):
            await self._ask("stop")
        self.died("it was stopped")

    def died(self, why: str) -> None:
        """It has ended, or is not this client's any more."""
        if self._why_ended is None:
            self._why_ended = f"sandbox {self.ticket.name} at {self.ticket.server}: {why}"
            self.ended()


def _crossing(program: Program) -> dict[str, Any]:
    """The fields of a call that has a command."""
    given = {"command": list(program.words), "env": dict(program.variables)}
    return {**given, "cwd": program.cwd, "user": program.user, "output_bytes": program.output_bytes}


class RemotePort:
    """A port inside a sandbox that is served by a function at the client."""

    def __init__(self, call: WireCall) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()

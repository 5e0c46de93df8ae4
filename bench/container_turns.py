"""Sandboxes of namespaces and of the daemons of containers that run here, in turns: bench.sandboxes asks for it."""

import io
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from goaly.sandboxes.compiler import build
from goaly.sandboxes.container_request import OURS, PROGRAM
from goaly.sandboxes.containers import ContainerHost
from goaly.sandboxes.contract import Entry, SandboxSpec
from goaly.sandboxes.docker_api import DockerApi
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import ContainerSettings

Result = TypeVar("Result")
TURNS = 15
COMMANDS = 20


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared. The command is the same on all: our program without words, which ends at once."""

    name: str
    host: SandboxHost
    spec: SandboxSpec
    command: list[str]
    api: DockerApi | None = None


async def in_turns(sockets: list[str], small: SandboxSpec) -> dict[str, float]:
    """Medians in ms of a start, a command, a snapshot, a fork and an end, by the daemon's name, beside namespaces'.

    `NAME_exec_ms` is a command by the daemon's own exec."""
    program = build("resident", static=True).read_bytes()
    took: defaultdict[str, list[float]] = defaultdict(list)

    async def timed(name: str, work: Awaitable[Result]) -> Result:
        began = time.perf_counter()
        result = await work
        took[name].append(time.perf_counter() - began)
        return result

    async def turn(side: Side) -> None:
        sandbox: Sandbox = await timed(f"{side.name}_start_ms", side.host.start(side.spec))
        if not side.api:
            await sandbox.upload([Entry(path="resident", contents=program, mode=0o755)], "/tmp")
        for _ in range(COMMANDS):
            await timed(f"{side.name}_command_ms", sandbox.run(side.command))
        if side.api:
            await timed(f"{side.name}_exec_ms", executed(side.api, sandbox.ticket.name))
        snapshot = await timed(f"{side.name}_snapshot_ms", sandbox.snapshot())
        fork = await timed(f"{side.name}_fork_ms", side.host.start(side.spec, origin=snapshot))
        await fork.stop()
        await timed(f"{side.name}_end_ms", sandbox.stop())
        await side.host.forget(snapshot)

    async with AsyncExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        namespaces = await NamespaceHost.open()
        closing.push_async_callback(namespaces.close)
        sides = [Side("namespaces", namespaces, small, ["/tmp/resident"])]
        for socket in sockets:
            host = await ContainerHost.open(ContainerSettings(socket=socket))
            closing.push_async_callback(host.close)
            api = await closing.enter_async_context(DockerApi(Path(socket)))
            spec = SandboxSpec(image=empty_image(Path(folder)), limits=small.limits)
            await (await host.start(spec)).stop()
            sides.append(Side(await daemon_name(api), host, spec, [PROGRAM], api))
        for _ in range(TURNS):
            for side in sides:
                await turn(side)
    return {name: median(seconds) * 1e3 for name, seconds in took.items()}


async def executed(api: DockerApi, container: str) -> None:
    """Run our program in a container to its end, without our first process."""
    stream = await api.exec(container, [PROGRAM], user=f"{OURS}:{OURS}")
    while await stream.read():
        pass
    stream.close()


async def daemon_name(api: DockerApi) -> str:
    components = (await api.ask("GET", "/version")).get("Components") or [{"Name": "Docker"}]
    return "podman" if "Podman" in components[0]["Name"] else "docker"


def empty_image(folder: Path) -> str:
    """A tar of a root with a folder for files of all users."""
    path = folder / "empty.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("tmp")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(entry, io.BytesIO())
    return str(path)

"""Sandboxes in containers of Docker or Podman, with any runtime of its daemon: runc, runsc (gVisor), kata.

    host = await ContainerHost.open(ContainerSettings())
    sandbox = await host.start(SandboxSpec(image="debian:12"))

A container's first process is ours (`native/resident.c`): it runs commands as that of a sandbox of namespaces does. A
client speaks with it by a stream of the daemon, so the container shares no folder and no socket of this host. It ends
the container when it has had no client for `seconds_unowned`: nothing stays when all processes on this side are killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import re
import secrets
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from goaly.sandboxes.channel import Ends, Message
from goaly.sandboxes.compiler import build
from goaly.sandboxes.container_images import Image, Images
from goaly.sandboxes.container_request import HOME, OURS, PROGRAM, SANDBOX, request_of
from goaly.sandboxes.container_stream import RelayedPort, StreamChannel
from goaly.sandboxes.contract import FileSnapshot, SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.docker_api import Conflict, DockerApi, NotThere
from goaly.sandboxes.resident import ResidentSandbox
from goaly.sandboxes.sandbox import DEFAULTS, Handler, SandboxHost
from goaly.sandboxes.settings import ContainerSettings

SNAPSHOT = "goaly.snapshot"
"""Label of the images of snapshots."""
SNAPSHOTS = "localhost/goaly-snapshot"
"""The name of their images, each with a tag of its own."""
NEVER_STARTED_SECONDS = 600
UNDO_SECONDS = 30.0
"""Longest wait of a cancelled start for the daemon to remove what it began; it goes on in the background."""
STORAGE = ({"size", "inodes"}, {"size"}, set[str]())
"""Limits of a container's files that a daemon may have, the best first."""
NO_SUCH_LIMIT = re.compile("storage|option", re.IGNORECASE)
"""In what a daemon says of a limit of files that it does not have."""


class ContainerHost(SandboxHost):
    """A client of a daemon."""

    def __init__(self, api: DockerApi, settings: ContainerSettings, program: Path, info: dict[str, Any]) -> None:
        self.images = Images(api, settings.parallel_builds)
        # With other drivers than overlays, the size of a container's files would be with those of its image.
        self.storage: set[str] | None = None if info["Driver"].startswith("overlay") else set()
        """The limits of a sandbox's files that the daemon has: `size`, `inodes`; None before the first start."""
        runtime = settings.runtime or info.get("DefaultRuntime")
        self.about = f"version {info['ServerVersion']} with {runtime}; it knows {', '.join(sorted(info['Runtimes']))}"
        """The daemon, in a few words."""
        self.maps_users = any("name=userns" in option for option in info.get("SecurityOptions") or ())
        """Whether user 0 of a container is another one on the host."""
        self._api = api
        self._settings = settings
        self._program = program
        self._starts = asyncio.Semaphore(settings.parallel_starts)
        self._program_lock = asyncio.Lock()
        self._has_program = False
        self._live: dict[str, ContainerSandbox] = {}
        self._snapshots: set[str] = set()
        self._forgotten: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: ContainerSettings) -> Self:
        """A host at the daemon's socket. It removes what a power cut left there."""
        program = await asyncio.to_thread(build, "resident", static=True)
        api = DockerApi(Path(settings.socket))
        try:
            info = await api.ask("GET", "/info")
            runtimes = sorted(info.get("Runtimes") or {})
            if settings.runtime is not None and settings.runtime not in runtimes:
                raise SandboxUnavailable(
                    f"runtime={settings.runtime!r} must be one that the daemon knows: {', '.join(runtimes)}"
                )
            host = cls(api, settings, program, info)
            await host._reap()
        except BaseException:
            await api.close()
            raise
        return host

    async def prepare(self, image: str) -> None:
        """Pull, load or build an image ahead of the starts that need it."""
        await self.images.get(image)

    async def start(self, spec: SandboxSpec, *, origin: FileSnapshot | None = None) -> ContainerSandbox:
        if spec.image is None or spec.root != Path("/") or spec.hidden:
            raise SandboxUnavailable(
                f"the backend containers starts images, without root or hidden folders "
                f"(image={spec.image!r}, root={str(spec.root)!r}, hidden={spec.hidden!r}): give image only, "
                "or use the backend namespaces"
            )
        if spec.user == OURS:
            raise SandboxUnavailable(f"user={OURS} is reserved: use another one")
        image = await (self.images.inspect(origin.layers[0]) if origin else self.images.get(spec.image))
        task = asyncio.create_task(self._started(spec, image))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undone = asyncio.create_task(_undo(task))  # the daemon goes on with what it has begun
            self._background.add(undone)
            undone.add_done_callback(self._background.discard)
            await asyncio.shield(asyncio.wait({undone}, timeout=UNDO_SECONDS))
            raise

    async def _started(self, spec: SandboxSpec, image: Image) -> ContainerSandbox:
        name = f"goaly-{secrets.token_hex(8)}"
        async with self._starts:
            try:
                try:
                    return await self._run(name, spec, image)
                except SandboxError:
                    if self._has_program:
                        raise
                    await self.remove(name)
                    await self._put_program(image)
                return await self._run(name, spec, image)
            except SandboxError as error:
                await self.remove(name)
                raise SandboxUnavailable(f"a container did not start: {error}") from error

    async def _run(self, name: str, spec: SandboxSpec, image: Image) -> ContainerSandbox:
        await self._create(name, request_of(spec, image, self._program.name, self._settings.runtime), spec)
        await self._api.ask("POST", f"/containers/{name}/start")
        sandbox = await self._joined(ContainerTicket(name, spec, image))
        self._has_program = True
        return sandbox

    async def _create(self, name: str, wanted: dict[str, Any], spec: SandboxSpec) -> None:
        values = {"size": f"{spec.limits.disk_mib}M", "inodes": str(spec.limits.files)}
        for storage in STORAGE if self.storage is None else (self.storage,):
            wanted["HostConfig"]["StorageOpt"] = {key: values[key] for key in storage}
            try:
                await self._api.ask("POST", "/containers/create", query={"name": name}, record=wanted)
            except SandboxError as error:
                if not storage or not NO_SUCH_LIMIT.search(str(error)):
                    raise
            else:
                self.storage = storage
                return

    async def _put_program(self, image: Image) -> None:
        """Put the first process' program into a volume that all containers share, if it is not there."""
        name, spec = f"goaly-{secrets.token_hex(8)}", SandboxSpec(image=image.name)
        wanted = request_of(spec, image, self._program.name, self._settings.runtime)
        wanted["HostConfig"]["Mounts"][0]["ReadOnly"] = False
        path = f"/containers/{name}/archive"
        async with self._program_lock:
            with self._program.with_suffix(".lock").open("w") as lock:  # two processes must not write it at once
                await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
                try:
                    await self._create(name, wanted, spec)
                    try:
                        await self._api.ask("HEAD", path, query={"path": PROGRAM})
                    except NotThere:
                        packed = await asyncio.to_thread(_packed, self._program)
                        await self._api.ask("PUT", path, query={"path": HOME}, body=packed)
                finally:
                    await asyncio.shield(self.remove(name))

    async def adopt(self, ticket: ContainerTicket) -> ContainerSandbox:
        try:
            sandbox = await self._joined(ticket)
            await sandbox.go_on()
            return sandbox
        except (NotThere, Conflict) as error:
            raise SandboxDied(f"sandbox {ticket.name} has ended: {error}") from error

    async def _joined(self, ticket: ContainerTicket) -> ContainerSandbox:
        stream = await self._api.exec(ticket.name, [PROGRAM, "relay"], user=f"{OURS}:{OURS}")
        sandbox = ContainerSandbox(self, ticket, StreamChannel(stream, f"sandbox {ticket.name}"))
        self._live[ticket.name] = sandbox
        try:
            await sandbox.ready()
        except BaseException as error:
            self._live.pop(ticket.name, None)
            sandbox.died()
            if isinstance(error, SandboxDied) and stream.errors:
                raise SandboxDied(f"{error}: {stream.errors.decode(errors='replace').strip()}") from error
            raise
        return sandbox

    async def see(self, container: str, path: str) -> None:
        """SandboxError if the daemon does not see a file that its container has."""
        try:
            await self._api.ask("HEAD", f"/containers/{container}/archive", query={"path": path})
        except NotThere as error:
            raise SandboxError(
                f"runtime={self._settings.runtime!r} keeps {path} where the daemon does not see it: a snapshot would "
                "lack files. Give gVisor `--overlay2=none`, and use an image whose /tmp is not empty"
            ) from error

    async def commit(self, container: str) -> str:
        """The name of an image of a container's files."""
        tag = secrets.token_hex(16)
        query = {"container": container, "repo": SNAPSHOTS, "tag": tag, "changes": f"LABEL {SNAPSHOT}=1"}
        await self._api.ask("POST", "/commit", query=query, record={})
        self._snapshots.add(f"{SNAPSHOTS}:{tag}")
        return f"{SNAPSHOTS}:{tag}"

    async def forget(self, snapshot: FileSnapshot) -> None:
        self._snapshots.discard(snapshot.layers[0])
        self._forgotten.add(snapshot.layers[0])
        await self._remove_forgotten()

    async def _remove_forgotten(self) -> None:
        """Remove the images of forgotten snapshots that no sandbox needs any more."""
        for name in list(self._forgotten):
            with suppress(Conflict):
                with suppress(NotThere):
                    await self._api.ask("DELETE", f"/images/{name}")
                self._forgotten.discard(name)

    async def remove(self, name: str) -> None:
        """End a container and wait until it is gone."""
        with suppress(NotThere):
            try:
                await self._api.ask("DELETE", f"/containers/{name}", query={"force": 1, "v": 1})
            except Conflict:  # it is about to go
                await self._api.ask("POST", f"/containers/{name}/wait", query={"condition": "removed"})
        self._live.pop(name, None)
        await self._remove_forgotten()

    async def _reap(self) -> None:
        """Remove what nobody can want: containers that were made and never started, and old snapshots without any."""
        found = await self._api.ask(
            "GET", "/containers/json", query={"all": 1, "filters": json.dumps({"label": [SANDBOX]})}
        )
        now = time.time()
        for container in found:
            if container["State"] == "created" and container["Created"] < now - NEVER_STARTED_SECONDS:
                await self.remove(container["Id"])
        used = {container["ImageID"] for container in found}
        for image in await self._api.ask("GET", "/images/json", query={"filters": json.dumps({"label": [SNAPSHOT]})}):
            if image["Id"] not in used and image["Created"] < now - self._settings.snapshot_hours * 3600:
                self._forgotten.update(image.get("RepoTags") or [image["Id"]])
        await self._remove_forgotten()

    async def leave(self) -> None:
        while self._live:
            self._live.popitem()[1].died()
        await self._end()

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._live.values())))
        self._forgotten |= self._snapshots
        self._snapshots.clear()
        await self._remove_forgotten()
        await self._end()

    async def _end(self) -> None:
        await asyncio.gather(*self._background)
        await self._api.close()


def _packed(program: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive, program.open("rb") as contents:
        entry = archive.gettarinfo(program, Path(PROGRAM).name)
        entry.mode, entry.uid, entry.gid, entry.uname, entry.gname = 0o755, 0, 0, "", ""
        archive.addfile(entry, contents)
    return file.getvalue()


async def _undo(task: asyncio.Task[ContainerSandbox]) -> None:
    with suppress(SandboxError):
        await (await task).stop()


@dataclass(frozen=True, slots=True)
class ContainerTicket:
    """Names a live container to another client of the same daemon."""

    name: str
    spec: SandboxSpec
    image: Image


class ContainerSandbox(ResidentSandbox):
    """A sandbox in a container."""

    def __init__(self, host: ContainerHost, ticket: ContainerTicket, channel: StreamChannel) -> None:
        self.ticket = ticket
        self.variables = {**DEFAULTS, **ticket.image.environment}
        self._host = host
        self._memory_kills_seen = 0
        self._stream = channel
        super().__init__(ticket.spec, channel)

    def _memory_kills(self) -> int:
        return self._memory_kills_seen

    def _event(self, message: Message) -> None:
        if message[0] == "X":
            self._memory_kills_seen = max(self._memory_kills_seen, *map(int, message[2][1:]), 0)
        super()._event(message)

    async def go_on(self) -> None:
        """Find the command that an earlier client kept."""
        if self._stream.kept:
            await self.go_on_with(*self._stream.kept)

    async def _keep(self, number: int, output_bytes: int, ends: Ends) -> None:
        await self._stream.keep(number, output_bytes)

    async def snapshot(self) -> FileSnapshot:
        if self.ticket.image.volumes:
            folders = ", ".join(self.ticket.image.volumes)
            raise SandboxError(f"image {self.spec.image!r} keeps volumes, which no snapshot has: {folders}")
        await self._channel.ask("N")
        await self._check_that_files_are_seen()
        return FileSnapshot((await self._host.commit(self.ticket.name),), self.spec)

    async def _check_that_files_are_seen(self) -> None:
        """Some runtimes keep files to themselves: a snapshot would lack them and nobody would know."""
        path = f"/tmp/.goaly-{secrets.token_hex(8)}"
        await self.write(path, b"")
        try:
            await self._host.see(self.ticket.name, path)
        finally:
            await self.run(["rm", "-f", path])

    async def assign(self, spec: SandboxSpec) -> None:
        await self._channel.ask("T", str(spec.seconds_to_live or 0))
        self.spec = spec
        self.ticket = replace(self.ticket, spec=spec)

    async def serve(self, port: int, handler: Handler) -> RelayedPort:
        number = self._channel.new_id()
        listener = RelayedPort(self._stream, number, handler)
        try:
            await self._channel.ask("L", port, number=number)
        except BaseException:
            listener.close()
            raise
        return listener

    async def stop(self) -> None:
        await self._host.remove(self.ticket.name)
        self.died()

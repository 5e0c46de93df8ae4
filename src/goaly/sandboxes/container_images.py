"""Images of containers: pulled, loaded or built once, ahead of the starts that need them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from goaly.sandboxes.contract import SandboxError, SandboxUnavailable
from goaly.sandboxes.docker_api import DockerApi, NotThere

MADE = "localhost/goaly-image-"
"""Names of images that were made from a file or a folder begin so, and end with a digest of what they were made from.
Podman would look for names without a registry at a public one, and gives no tag to what it imports."""
LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the daemon has."""

    name: str
    environment: Mapping[str, str]
    volumes: tuple[str, ...]
    """Folders that the image keeps out of its layers, and so out of snapshots."""


class Images:
    """The images of a daemon."""

    def __init__(self, api: DockerApi, parallel_builds: int) -> None:
        self._api = api
        self._builds = asyncio.Semaphore(parallel_builds)
        self._known: dict[str, asyncio.Task[Image]] = {}

    async def get(self, image: str) -> Image:
        """An image by name, which is pulled if it is missing, of a tar, or of a folder with a Dockerfile."""
        task = self._known.get(image)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._known[image] = asyncio.create_task(self._made(image))
        return await asyncio.shield(task)

    async def _made(self, image: str) -> Image:
        if image.startswith(("/", ".")):
            return await self.inspect(await self._of_path(Path(image)))
        try:
            return await self.inspect(image)
        except NotThere:
            async with self._builds:
                await self._pull(image)
        return await self.inspect(image)

    async def inspect(self, name: str) -> Image:
        """An image that is there."""
        found = await self._api.ask("GET", f"/images/{name}/json")
        config = found.get("Config") or {}
        variables = (entry.partition("=") for entry in config.get("Env") or ())
        return Image(name, {key: value for key, _, value in variables}, tuple(config.get("Volumes") or ()))

    async def _pull(self, image: str) -> None:
        last = image.rpartition("/")[2]
        query = {"fromImage": image if ":" in last or "@" in last else f"{image}:latest"}
        await self._finish(f"image {image!r} cannot be pulled", "/images/create", query, None)

    async def _of_path(self, path: Path) -> str:
        """The name of the image that a file or a folder makes."""
        async with self._builds:
            source = await asyncio.to_thread(_source, path)
            with source.file:
                name = f"{MADE}{source.digest}"
                try:
                    await self.inspect(name)
                except NotThere:
                    await self._make(path, source)
        return name

    async def _make(self, path: Path, source: _Source) -> None:
        failure, name = f"image {str(path)!r} cannot be made", f"{MADE}{source.digest}"
        if source.kind == "build":
            await self._finish(failure, "/build", {"t": name, "rm": 1, "forcerm": 1}, source.file)
        elif source.kind == "import":
            await self._finish(failure, "/images/create", {"fromSrc": "-", "repo": name}, source.file)
        else:
            lines = await self._finish(failure, "/images/load", {}, source.file)
            loaded = [line.split(": ", 1)[1].strip() for line in lines if line.startswith("Loaded image")]
            if not loaded:
                raise SandboxUnavailable(f"{failure}: it has no image")
            await self._api.ask("POST", f"/images/{loaded[0]}/tag", query={"repo": name, "tag": "latest"})

    async def _finish(self, failure: str, path: str, query: Mapping[str, str | int], body: Any) -> list[str]:
        """Follow a long request to its end; what it said."""
        lines: list[str] = []
        try:
            async for report in self._api.follow(path, query=query, body=body):
                if "error" in report:
                    raise SandboxError(report["error"])
                if said := str(report.get("stream") or report.get("status") or "").strip():
                    lines.append(said)
        except SandboxError as error:
            context = "\n".join(lines[-LAST_LINES:])
            raise SandboxUnavailable(f"{failure}: {error}\n{context}".strip()) from error
        except json.JSONDecodeError as error:
            raise SandboxUnavailable(f"{failure}: the daemon's answer is malformed: {error}") from error
        return lines


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of an image."""

    kind: Literal["build", "load", "import"]
    file: IO[bytes]
    digest: str


def _source(path: Path) -> _Source:
    """Blocks."""
    if (path / "Dockerfile").is_file():
        kind, file = "build", _packed(path)
    elif path.is_file():
        kind, file = "load" if _is_saved(path) else "import", path.open("rb")
    else:
        raise SandboxUnavailable(f"image={str(path)!r} must be a tar or a folder with a Dockerfile")
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    file.seek(0)
    return _Source(kind, file, digest.hexdigest()[:32])


def _packed(folder: Path) -> IO[bytes]:
    """A tar of a folder that depends on names, modes and contents only."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=file, mode="w") as archive:
        for at, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted([*names, *folders]):
                path = Path(at, name)
                entry = archive.gettarinfo(path, str(path.relative_to(folder)))
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
                if entry.isfile():
                    with path.open("rb") as contents:
                        archive.addfile(entry, contents)
                else:
                    archive.addfile(entry)
    file.seek(0)
    return file


def _is_saved(path: Path) -> bool:
    """Whether a tar is what `docker save` writes, not the files of a root."""
    try:
        with tarfile.open(path) as archive:
            return any(entry.name in ("manifest.json", "index.json") for entry in archive)
    except tarfile.TarError as error:
        raise SandboxUnavailable(f"image={str(path)!r} is no tar: {error}") from error

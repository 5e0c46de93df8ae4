"""The abilities of a daemon of containers, and the bounds that it cannot keep."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from goaly.sandboxes.container_request import PROGRAM
from goaly.sandboxes.containers import ContainerHost
from goaly.sandboxes.contract import Limits, SandboxError, SandboxSpec
from goaly.sandboxes.settings import ContainerSettings

USAGE_ERROR = 2
"""Exit code of our program without words."""


async def checked(settings: ContainerSettings) -> list[str]:
    """Start a container of an empty image; the lines to print: whether it works, and what is not bounded."""
    try:
        host = await ContainerHost.open(settings)
    except SandboxError as error:
        return [f"no: {error}"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "empty.tar")
            with tarfile.open(image, "w") as archive:
                entry = tarfile.TarInfo("tmp/nothing")
                archive.addfile(entry, io.BytesIO())
            spec = SandboxSpec(image=str(image), limits=Limits(memory_mib=256, disk_mib=64, processes=64))
            sandbox = await host.start(spec)
        if (await sandbox.run([PROGRAM])).exit_code != USAGE_ERROR:
            return ["no: a command did not run in a container"]
        return [f"yes: {host.about}", *_not_kept_in(host)]
    except SandboxError as error:
        return [f"no: {error}"]
    finally:
        await host.close()


def _not_kept_in(host: ContainerHost) -> list[str]:
    lines = []
    if "size" not in (host.storage or ()):
        lines.append(
            "not limited for a sandbox as a whole: bytes of its files (`file_mib` bounds each); Docker limits them on "
            "xfs with the mount option pquota"
        )
    if "inodes" not in (host.storage or ()):
        lines.append("not limited: number of its files")
    if not host.maps_users:
        lines.append(
            "user 0 of a sandbox is user 0 of the host, without capabilities: start the daemon with userns-remap"
        )
    return lines

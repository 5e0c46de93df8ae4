"""The request to the daemon: a container without rights, network and unbounded resources, which runs our program."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from goaly.sandboxes.container_images import Image
from goaly.sandboxes.contract import SandboxSpec
from goaly.sandboxes.resident import OPEN_FILES

HOME = "/.goaly"
"""Folder of the first process' program inside."""
PROGRAM = f"{HOME}/resident"
OURS = 65533
"""User of the first process, and of those that join a client with it: no command can be it."""
SANDBOX = "goaly.sandbox"
"""Label of our containers."""
CAPABILITIES = ["SETUID", "SETGID", "SETPCAP", "KILL"]
"""Of the first process, which starts and ends commands of other users. Commands have none."""


def request_of(spec: SandboxSpec, image: Image, volume: str, runtime: str | None) -> dict[str, Any]:
    """The body of a request to create a container; `volume` has our program."""
    limits, memory = spec.limits, spec.limits.memory_mib << 20
    mount = {"Type": "volume", "Source": volume, "Target": HOME, "ReadOnly": True}
    return {
        "Image": image.name,
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": [PROGRAM],
        "Cmd": ["init", str(spec.seconds_unowned), str(spec.seconds_to_live or 0), str(int(spec.debuggers))],
        "Labels": {SANDBOX: "1", **{f"goaly.{key}": value for key, value in spec.labels.items()}},
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "none",
            "IpcMode": "private",
            "CapDrop": ["ALL"],
            "CapAdd": CAPABILITIES,
            "SecurityOpt": ["no-new-privileges"],
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.processes,
            "Ulimits": _ulimits(),
            "LogConfig": {"Type": "none"},
            "Mounts": [mount],
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def _ulimits() -> list[dict[str, Any]]:
    """Of processes: as many as this machine can have. Podman would raise that, which not every machine permits it."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limits = {"nofile": OPEN_FILES, "nproc": most if hard == resource.RLIM_INFINITY else min(most, hard)}
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in limits.items()]

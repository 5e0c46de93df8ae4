"""Where a run's sandboxes run, what each may use, and how many live at once."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Literal

from goaly.base.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, Settings
from goaly.sandboxes.contract import Limits, SandboxSpec


class PoolSettings(Settings):
    """How many sandboxes live at once, how many wait ready, and how fast they start."""

    most: PositiveInt = 256
    """Most sandboxes of one process that live at once; further starts wait."""
    memory_gib: PositiveFloat | None = None
    """Most memory that the limits of one process's live sandboxes may add up to; further starts wait. Null is no bound:
    a sandbox seldom uses its limit. Set it where the host's memory is scarce."""
    disk_gib: PositiveFloat | None = None
    """Most bytes of files that the limits of one process's live sandboxes may add up to; further starts wait. Null is
    no bound. The backend `namespaces` keeps files in memory."""
    warm: NonNegativeInt = 0
    """Sandboxes that wait ready for each state that was asked for lately. Raise it where starts are slow, as those of
    containers are. They count in the bounds above, and make room for others that are needed."""
    warm_states: PositiveInt = 8
    """States (a root, an image or a snapshot, with limits) that keep warm sandboxes: those that were used last."""
    starts_at_once: PositiveInt = 16
    """Starts that all processes on this host make at once; further ones wait. Lower it where many starts at once make
    each slow, as those of containers do."""
    start_seconds: PositiveFloat = 120.0
    """Time limit of one start, apart from its wait. A start that takes longer fails, and its place goes to the next."""


class ContainerSettings(Settings):
    """The daemon of the backend `containers`, and how it starts them."""

    socket: str = "/run/docker.sock"
    """Path of the daemon's socket. Podman's is `/run/podman/podman.sock`, served by `podman system service`."""
    runtime: str | None = None
    """Runtime that the daemon starts containers with, by its name there: `runc`, `runsc` (gVisor) or `kata`. Null is
    the daemon's default. Choose gVisor or Kata for code that might attack the kernel."""
    parallel_starts: PositiveInt = 4
    """Containers that one process starts at once; further starts wait. Each takes a third of a second of work."""
    parallel_builds: PositiveInt = 1
    """Images that one process pulls, loads or builds at once."""
    snapshot_hours: PositiveFloat = 48.0
    """The next start removes snapshots that are older than this and that no container uses: those of processes that
    were killed. Raise it above the longest time that a run is stopped."""


class RemoteSettings(Settings):
    """The backend `remote`: sandboxes of machines that run `python -m apps.sandboxes.main`."""

    servers: tuple[str, ...] = ()
    """URLs of the servers, such as `https://sandboxes-1:8700`. A sandbox starts at the least loaded one."""
    key_variable: str = "GOALY_SANDBOX_KEY"
    """Environment variable with the key, which is one of each server's tokens."""
    ca: str | None = None
    """PEM file with the authority that signed the servers' certificates; null: those that the system trusts."""
    silent_seconds: PositiveFloat = 30.0
    """A server that does not answer for this long is lost, and its sandboxes with it. Raise it if the network is slow,
    or if rollout workers block their event loops for longer."""
    start_seconds: PositiveFloat = 120.0
    """Longest time for which the start of a sandbox waits for a server with room."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, without slashes at the end."""
        return tuple(server.rstrip("/") for server in self.servers)

    def _problems(self, at: Section) -> Iterator[str]:
        for url in self.urls:
            if not re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:@?#]+)(:\d{1,5})?", url):
                yield f"{at.servers}: {url} must be a URL without a path, such as https://sandboxes-1:8700"
        if len(set(self.urls)) < len(self.urls):
            yield f"{at.servers}: must name each server once"
        if self.ca is not None:
            try:
                ssl.create_default_context(cafile=self.ca)
            except OSError as error:
                yield f"{at.ca}: must be a PEM file with certificates: {error}"


class SandboxSettings(Settings):
    """The sandboxes in which a policy's commands run."""

    backend: Literal["namespaces", "containers", "remote"] = "namespaces"
    """`namespaces`: Linux namespaces on this host, which need no daemon. `containers`: Docker or Podman.
    `remote`: hosts that run `python -m apps.sandboxes.main`."""
    root: str = "/"
    """Folder that is the root of sandboxes whose task names neither a folder nor an image. They do not write to it."""
    limits: Limits = field(default_factory=Limits)
    """Limits of sandboxes whose task does not set its own."""
    seconds_unowned: PositiveInt = 120
    """A sandbox ends this long after its process died, unless another process takes it over. Raise it if workers take
    longer to come back."""
    seconds_to_live: PositiveFloat | None = None
    """A sandbox ends this long after its start, whatever runs in it. Null is no limit."""
    containers: ContainerSettings = field(default_factory=ContainerSettings)
    """The backend `containers`."""
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    """The backend `remote`."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    """How many sandboxes live at once, how many wait ready, and how fast they start."""

    def _problems(self, at: Section) -> Iterator[str]:
        if not self.root.startswith("/"):
            yield f"{at.root}: must be an absolute path"
        elif self.backend == "namespaces" and not Path(self.root).is_dir():
            yield f"{at.root}: there is no such folder on this host"
        if self.backend == "remote" and not self.remote.servers:
            yield f"{at.remote.servers}: must name at least one server for {at.backend}"
        if self.backend != "remote":
            yield from at.remote.idle(f"with {at.backend}")

    def spec(self, **changes: object) -> SandboxSpec:
        """A sandbox as these settings say, with these fields of a spec changed."""
        given = {
            "root": Path(self.root),
            "limits": self.limits,
            "seconds_unowned": self.seconds_unowned,
            "seconds_to_live": self.seconds_to_live,
        }
        return SandboxSpec(**given | changes)  # type: ignore[arg-type]

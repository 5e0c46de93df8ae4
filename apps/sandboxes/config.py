"""The settings of a server of sandboxes."""

import ssl
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from goaly.base.access import token_problems, tokens_of
from goaly.base.config.settings import PositiveFloat, PositiveInt, Section, Settings
from goaly.sandboxes.settings import ContainerSettings, PoolSettings, SandboxSettings

TOKENS = "GOALY_SANDBOX_TOKENS"
"""Environment variable with the tokens of clients, separated by commas."""


class SandboxServerConfig(Settings):
    """A server of sandboxes."""

    host: str = "127.0.0.1"
    """Address that the server listens on. Others than loopback need tokens: who reaches the server runs programs."""
    port: Annotated[int, Ge(0), Le(65535)] = 8700
    """Port that it listens on; 0 lets the system choose."""
    tokens_file: str | None = None
    """File with a token in each line, one of which a client must send as its key. null: those of the environment
    variable `GOALY_SANDBOX_TOKENS`, separated by commas; without any, every client on this machine is served."""
    certificate: str | None = None
    """PEM file with the server's certificate and its chain, for https. null: traffic is not encrypted."""
    private_key: str | None = None
    """PEM file with the private key of `certificate`."""
    backend: Literal["namespaces", "containers"] = "namespaces"
    """How this machine isolates sandboxes. `namespaces`: Linux namespaces, which need no daemon. `containers`: Docker
    or Podman."""
    containers: ContainerSettings = field(default_factory=ContainerSettings)
    """The backend `containers`."""
    roots: tuple[str, ...] = ("/",)
    """Folders of this machine that may be the root of sandboxes. Clients read what is in them; in `/`, the folders of
    users (/root, /home, /tmp and the like) are empty."""
    sandboxes: PositiveInt = 256
    """Most sandboxes that live at once; further starts wait, or go to other servers."""
    memory_gib: PositiveFloat | None = None
    """Most memory that the limits of all live sandboxes may add up to; further starts wait. Null is no bound: a sandbox
    seldom uses its limit. Set it where this machine's memory is scarce."""
    silent_seconds: PositiveFloat = 60.0
    """A client that does not answer for this long is gone: its sandboxes wait `seconds_unowned` for another. Raise it
    if clients block their event loops for longer."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens, of which a client needs one; empty if it needs none."""
        return tokens_of(self.tokens_file, TOKENS)

    @property
    def memory_mib(self) -> float | None:
        return None if self.memory_gib is None else self.memory_gib * 1024

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The certificate, ready to be used; None without one."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.private_key)
        return context

    @property
    def backend_settings(self) -> SandboxSettings:
        """As `open_host` takes them."""
        pool = PoolSettings(most=self.sandboxes, memory_gib=self.memory_gib)
        return SandboxSettings(backend=self.backend, containers=self.containers, pool=pool)

    def _problems(self, at: Section) -> Iterator[str]:
        yield from token_problems(at, self.host, self.tokens_file, TOKENS)
        if (self.certificate is None) != (self.private_key is None):
            yield f"{at.private_key}: set both certificate and private_key, or neither"
        else:
            try:
                _ = self.tls
            except (OSError, ssl.SSLError) as error:
                yield f"{at.certificate}: cannot be used with {at.private_key}: {error}"
        if self.backend == "namespaces":
            yield from at.containers.idle(f"with {at.backend}")
        for root in self.roots:
            if not root.startswith("/") or not Path(root).is_dir():
                yield f"{at.roots}: {root} must be the absolute path of a folder of this machine"

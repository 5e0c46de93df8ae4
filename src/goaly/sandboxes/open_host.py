"""Opens the host of sandboxes that the settings name."""

from goaly.sandboxes.contract import SandboxUnavailable
from goaly.sandboxes.pool import SandboxPool
from goaly.sandboxes.sandbox import SandboxHost
from goaly.sandboxes.settings import SandboxSettings


async def open_host(settings: SandboxSettings, *, shared: str | None = None) -> SandboxPool:
    """The backend's host, within the bounds of `pool`. Its `close` ends the sandboxes.

    Processes of this host that give the same name as `shared` can adopt each other's sandboxes.
    """
    return SandboxPool(await _backend(settings, shared), settings.pool)


async def _backend(settings: SandboxSettings, shared: str | None) -> SandboxHost:
    if settings.backend == "namespaces":
        from goaly.sandboxes.namespaces import NamespaceHost

        return await NamespaceHost.open(shared)
    if settings.backend == "containers":
        from goaly.sandboxes.containers import ContainerHost

        return await ContainerHost.open(settings.containers)
    if settings.backend == "remote":
        from goaly.sandboxes.remote import RemoteHost

        return await RemoteHost.open(settings.remote)
    raise SandboxUnavailable(f"this version has no backend {settings.backend!r}")

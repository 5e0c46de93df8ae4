"""Opens the host of sandboxes that the settings name."""

from goaly.sandboxes.contract import SandboxUnavailable
from goaly.sandboxes.sandbox import SandboxHost
from goaly.sandboxes.settings import SandboxSettings


async def open_host(settings: SandboxSettings) -> SandboxHost:
    """The backend's host. Its `close` ends the sandboxes."""
    if settings.backend == "namespaces":
        from goaly.sandboxes.namespaces import NamespaceHost

        return await NamespaceHost.open()
    if settings.backend == "remote":
        from goaly.sandboxes.remote import RemoteHost

        return await RemoteHost.open(settings.remote)
    raise SandboxUnavailable(f"this version has no backend {settings.backend!r}")

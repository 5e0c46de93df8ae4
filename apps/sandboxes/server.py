"""Serves the sandboxes of this machine to clients on others, by HTTP: each client has one WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apps.sandboxes.config import SandboxServerConfig
from apps.sandboxes.served_client import ServedClient
from apps.sandboxes.service import SandboxService
from goaly.base.access import listening
from goaly.base.errors import RunFailed
from goaly.sandboxes.open_host import open_host
from goaly.sandboxes.remote_http import HttpListener
from goaly.sandboxes.remote_wire import BinarySocket


@asynccontextmanager
async def serving_sandboxes(config: SandboxServerConfig) -> AsyncIterator[str]:
    """The URL of a server that answers. Every sandbox has ended when the block is left."""
    try:
        listener = listening(config.host, config.port)
    except OSError as error:
        raise RunFailed(f"host={config.host} port={config.port}: {error.strerror or error}") from error
    with listener:
        service = SandboxService(await open_host(config.backend_settings), config)
        clients: set[ServedClient] = set()

        async def serve(socket: BinarySocket) -> None:
            client = ServedClient(service, socket, config.silent_seconds)
            clients.add(client)
            try:
                await client.run()
            finally:
                clients.remove(client)

        http = HttpListener(config.tokens, serve, service.status)
        try:
            await http.listen(listener, config.tls)
            scheme, name = "https" if config.tls else "http", f"[{config.host}]" if ":" in config.host else config.host
            yield f"{scheme}://{name}:{listener.getsockname()[1]}"
        finally:
            for client in clients:
                client.wire.lose("this server has ended")
            await service.close()
            await http.close()

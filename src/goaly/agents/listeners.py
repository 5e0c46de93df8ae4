"""The listening sockets of the rollout workers' endpoints, which the controller keeps open.

A worker that takes the place of a dead one has its address. Clients that connect in between wait for it. Only processes
of this user get a socket, and nothing is left of one when the controller ends, however it ends. Connections have
TCP_NODELAY, which Linux copies from the listening socket. asyncio sets it only on sockets that name their protocol,
which those of `socket.create_server` do not.
"""

import asyncio
import os
import secrets
import socket
from contextlib import suppress

from goaly.agents.settings import EndpointSettings
from goaly.base.access import listening
from goaly.base.errors import ConfigError
from goaly.base.process import is_own_user


def port_of(settings: EndpointSettings, worker: int) -> int:
    """The port of this worker of the run."""
    return settings.port and settings.port + worker


class Listeners:
    """The socket of each worker's endpoint. Workers on this host take theirs by its name."""

    def __init__(self, settings: EndpointSettings, workers: int):
        """Listens at all ports; ConfigError if another process has one."""
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self.names: list[str] = []
        """As `listener_of` takes them, in the order of the workers."""
        self.addresses: list[str] = []
        """As OpenAI's clients take them, in the order of the workers."""
        for worker in range(workers):
            port = port_of(settings, worker)
            try:
                kept = listening(settings.host, port)
            except OSError as error:
                self.close()
                why = error.strerror or error
                raise ConfigError(
                    [f"rollout.endpoint: cannot listen at {settings.host}, port {port}: {why}"]
                ) from error
            self._keep(kept)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.addresses.append(f"http://{host}:{kept.getsockname()[1]}/v1")

    def close(self) -> None:
        """Stop listening. Workers that still live keep theirs."""
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()

    def _keep(self, kept: socket.socket) -> None:
        name = f"\0goaly-{secrets.token_hex(16)}"  # in Linux's abstract namespace: no file is left
        door = socket.socket(socket.AF_UNIX)
        self._sockets += [kept, door]
        door.bind(name)
        door.listen()
        door.setblocking(False)
        self._loop.add_reader(door, _hand_out, kept, door)
        self.names.append(name)


def listener_of(name: str) -> socket.socket:
    """The socket that the controller keeps under this name; PermissionError if it gives none."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(name)
        _, given, _, _ = socket.recv_fds(door, 1, 1)
    if not given:
        raise PermissionError("the controller has ended, or is another user's")
    os.set_inheritable(given[0], False)  # a child would keep the port
    return socket.socket(fileno=given[0])


def _hand_out(kept: socket.socket, door: socket.socket) -> None:
    with suppress(OSError), door.accept()[0] as client:  # a worker that was killed while it waited
        if is_own_user(client):
            socket.send_fds(client, [b"\0"], [kept.fileno()])

"""The controller keeps the sockets of the endpoints, so that workers can die and clients only wait."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from goaly.agents.listeners import Listeners, listener_of
from goaly.agents.settings import EndpointSettings
from goaly.base.access import listening
from goaly.base.errors import ConfigError
from goaly.run.rendezvous import lasting_port

pytestmark = pytest.mark.asyncio

WORKER = """
import sys
from goaly.agents.listeners import listener_of

with listener_of(sys.argv[1].replace("@", "\\0")) as listener:
    client, _ = listener.accept()
    client.sendall(sys.argv[2].encode())
"""


async def worker(listeners: Listeners, answer: str) -> asyncio.subprocess.Process:
    """A process that takes a socket, answers one client, and ends."""
    name = listeners.names[0].replace("\0", "@")
    return await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, name, answer)


async def test_clients_wait_for_the_next_worker_at_the_same_address() -> None:
    listeners = Listeners(EndpointSettings(), 2)
    address, other = addresses(listeners)
    assert address != other
    for answer in ("first", "second"):
        reader, writer = await asyncio.open_connection(*address)  # nobody accepts it yet
        process = await worker(listeners, answer)
        assert (await reader.read()).decode() == answer
        writer.close()
        assert await process.wait() == 0
    listeners.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    with pytest.raises(ConnectionRefusedError):
        listener_of(listeners.names[0])


@pytest.mark.parametrize("kept", [True, False])
async def test_small_parts_of_a_response_are_sent_at_once(kept: bool) -> None:
    listeners = Listeners(EndpointSettings(), 1)
    name = listeners.names[0]
    listener = await asyncio.to_thread(listener_of, name) if kept else listening("127.0.0.1", 0)
    accepted = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("socket")
        accepted.set_result(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted
        writer.close()
    listeners.close()


async def test_a_port_that_another_process_has_is_named_and_no_other_stays_taken() -> None:
    port = lasting_port()  # the system gives neither this nor the next one to another test
    with listening("127.0.0.1", port + 1), pytest.raises(ConfigError, match=f"rollout.endpoint.*port {port + 1}"):
        Listeners(EndpointSettings(port=port), 2)
    listening("127.0.0.1", port).close()


async def test_another_user_gets_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = Listeners(EndpointSettings(), 1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError):
        await asyncio.to_thread(listener_of, listeners.names[0])
    listeners.close()


async def test_the_address_is_free_when_the_controller_was_killed() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from goaly.agents.listeners import Listeners\n"
        "from goaly.agents.settings import EndpointSettings\n"
        "async def main():\n"
        "    listeners = Listeners(EndpointSettings(), 1)\n"
        "    print(listeners._sockets[0].getsockname()[1], listeners.names[0][1:], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    told = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    port, name = told.stdout.split()
    listening("127.0.0.1", int(port)).close()
    with pytest.raises(ConnectionRefusedError):
        listener_of(f"\0{name}")


def addresses(listeners: Listeners) -> list[tuple[str, int]]:
    """Where the workers listen."""
    return [each.getsockname() for each in listeners._sockets if each.family == socket.AF_INET]


async def test_a_worker_that_dies_while_it_waits_harms_nobody() -> None:
    listeners = Listeners(EndpointSettings(), 1)
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.connect(listeners.names[0])
    taken = await asyncio.to_thread(listener_of, listeners.names[0])
    assert not taken.get_inheritable()
    taken.close()
    listeners.close()
    assert reports == []

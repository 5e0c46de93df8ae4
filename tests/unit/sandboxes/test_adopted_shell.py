"""A shell whose owner goes while a command runs: who adopts its sandbox goes on with it, and runs nothing twice."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from goaly.sandboxes.containers import ContainerHost
from goaly.sandboxes.contract import Limit, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import ContainerSettings, RemoteSettings
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import LOCAL

State = tuple[int, list[int]]
Hosts = tuple[SandboxHost, SandboxHost, SandboxSpec]


@pytest.fixture(params=[*LOCAL, "remote"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def hosts(backend: str, spec: SandboxSpec, request: pytest.FixtureRequest) -> AsyncIterator[Hosts]:
    """Two hosts that can adopt each other's sandboxes, and what to start."""
    name = f"test-{secrets.token_hex(6)}"

    async def host() -> SandboxHost:
        if backend == "containers":
            return await ContainerHost.open(ContainerSettings(socket=request.getfixturevalue("daemon")[0]))
        if backend == "remote":
            return await RemoteHost.open(RemoteSettings(servers=(request.getfixturevalue("remote_server").url,)))
        return await NamespaceHost.open(shared=name)

    async with AsyncExitStack() as closing:
        first, second = [await host() for _ in range(2)]
        for one in (first, second):
            closing.push_async_callback(one.close)
        yield first, second, spec


async def opened(hosts: Hosts, *commands: str) -> tuple[Sandbox, Shell]:
    """A shell that has run these commands."""
    sandbox = await hosts[0].start(hosts[2])
    shell = await Shell.open(sandbox)
    for command in commands:
        await shell.run(command)
    return sandbox, shell


async def adopted(hosts: Hosts, sandbox: Sandbox, state: State) -> tuple[Sandbox, Shell]:
    await hosts[0].leave()
    taken = await hosts[1].adopt(sandbox.ticket)
    shell = Shell.adopted(taken, *state)
    assert shell
    return taken, shell


async def test_a_shell_keeps_folder_variables_functions_and_jobs(hosts: Hosts):
    sandbox, shell = await opened(hosts, "cd /usr", "x=5; f() { echo f$x; }", "sleep 1000 & :")
    _, shell = await adopted(hosts, sandbox, shell.state)
    assert await shell.rest() is None
    assert (await shell.run("pwd; f; jobs -r | wc -l")).stdout.text() == "/usr\nf5\n1\n"


async def test_a_command_that_was_running_is_waited_for_and_not_run_again(hosts: Hosts):
    sandbox, shell = await opened(hosts, "mkfifo /tmp/go /tmp/begun")
    state = shell.state
    command = "echo > /tmp/begun; read line < /tmp/go; echo once >> /tmp/log; echo said; exit_() { return 7; }; exit_"
    running = asyncio.ensure_future(shell.run(command))
    await sandbox.run("read line < /tmp/begun")
    running.add_done_callback(lambda done: done.exception())
    taken, shell = await adopted(hosts, sandbox, state)
    waiting = asyncio.ensure_future(shell.rest())
    await taken.run("echo > /tmp/go")
    result = await waiting
    assert result
    assert (result.exit_code, result.stdout.text(), result.limit) == (7, "said\n", None)
    assert (await shell.run("cat /tmp/log")).stdout.text() == "once\n"


async def test_a_command_that_was_running_and_does_not_end_is_stopped(hosts: Hosts):
    sandbox, shell = await opened(hosts, "mkfifo /tmp/begun; sleep 1000 & :")
    state = shell.state
    running = asyncio.ensure_future(shell.run("echo > /tmp/begun; sleep 1000"))
    running.add_done_callback(lambda done: done.exception())
    await sandbox.run("read line < /tmp/begun")
    _, shell = await adopted(hosts, sandbox, state)
    result = await shell.rest(seconds=0.2)
    assert result
    assert result.limit is Limit.TIME
    assert (await shell.run("jobs -r | wc -l")).stdout.text() == "1\n"


async def test_the_end_that_the_earlier_owner_has_read_is_not_that_of_the_next_command(
    hosts: Hosts,
):
    sandbox, shell = await opened(hosts, ":")
    state = shell.state
    await shell.run("echo seen; (exit 9)")
    _, shell = await adopted(hosts, sandbox, state)
    assert await shell.rest() is None or shell.state[0] == state[0] + 1
    result = await shell.run("echo next; (exit 3)")
    assert (result.exit_code, result.stdout.text()) == (3, "next\n")


@pytest.mark.parametrize("written", [b"", b"touch /tmp/part", b"touch /tmp/part\0", b"touch /tmp/part\0ru"])
async def test_a_command_that_was_written_in_part_is_not_run(hosts: Hosts, written: bytes):
    sandbox, shell = await opened(hosts, ":")
    await shell._commands.write(written)
    _, shell = await adopted(hosts, sandbox, shell.state)
    assert await shell.rest() is None
    assert (await shell.run("ls /tmp/part; echo next")).stdout.text() == "next\n"


async def test_a_shell_that_ended_while_nobody_had_it_is_dead(hosts: Hosts):
    sandbox, shell = await opened(hosts, "mkfifo /tmp/go /tmp/begun")
    state = shell.state
    running = asyncio.ensure_future(shell.run("echo > /tmp/begun; read line < /tmp/go; exit 4"))
    running.add_done_callback(lambda done: done.exception())
    await sandbox.run("read line < /tmp/begun")
    await hosts[0].leave()
    taken = await hosts[1].adopt(sandbox.ticket)
    shell = Shell.adopted(taken, *state)
    assert shell
    await taken.run("echo > /tmp/go")
    result = await shell.rest()
    assert result
    assert result.exit_code == 4
    assert not shell.alive


async def test_a_shell_whose_end_the_earlier_owner_has_read_is_dead(hosts: Hosts):
    sandbox, shell = await opened(hosts)
    state = shell.state
    assert (await shell.run("exit 4")).exit_code == 4
    _, shell = await adopted(hosts, sandbox, state)
    result = await asyncio.wait_for(shell.rest(), 20)
    assert not shell.alive
    assert result
    assert result.exit_code in (4, 255)  # 255: unknown

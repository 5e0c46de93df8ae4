"""A shell whose owner goes while a command runs: who adopts its sandbox goes on with it, and runs nothing twice."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from goaly.sandboxes.contract import Limit, SandboxSpec
from goaly.sandboxes.namespaces import NamespaceHost
from goaly.sandboxes.remote import RemoteHost
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import RemoteSettings
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import SMALL

State = tuple[int, list[int]]


@pytest.fixture(params=["namespaces", "remote"])
async def hosts(request: pytest.FixtureRequest) -> AsyncIterator[tuple[SandboxHost, SandboxHost]]:
    if request.param == "remote":
        settings = RemoteSettings(servers=(request.getfixturevalue("remote_server").url,))
        first, second = [await RemoteHost.open(settings) for _ in range(2)]
    else:
        name = f"test-{secrets.token_hex(6)}"
        first, second = [await NamespaceHost.open(shared=name) for _ in range(2)]
    async with AsyncExitStack() as closing:
        for host in (first, second):
            closing.push_async_callback(host.close)
        yield first, second


async def opened(host: SandboxHost, *commands: str) -> tuple[Sandbox, Shell]:
    """A shell that has run these commands."""
    sandbox = await host.start(SandboxSpec(limits=SMALL))
    shell = await Shell.open(sandbox)
    for command in commands:
        await shell.run(command)
    return sandbox, shell


async def adopted(hosts: tuple[SandboxHost, SandboxHost], sandbox: Sandbox, state: State) -> tuple[Sandbox, Shell]:
    await hosts[0].leave()
    taken = await hosts[1].adopt(sandbox.ticket)
    shell = Shell.adopted(taken, *state)
    assert shell
    return taken, shell


async def test_a_shell_keeps_folder_variables_functions_and_jobs(hosts: tuple[SandboxHost, SandboxHost]):
    sandbox, shell = await opened(hosts[0], "cd /usr", "x=5; f() { echo f$x; }", "sleep 1000 & :")
    _, shell = await adopted(hosts, sandbox, shell.state)
    assert await shell.rest() is None
    assert (await shell.run("pwd; f; jobs -r | wc -l")).stdout.text() == "/usr\nf5\n1\n"


async def test_a_command_that_was_running_is_waited_for_and_not_run_again(hosts: tuple[SandboxHost, SandboxHost]):
    sandbox, shell = await opened(hosts[0], "mkfifo /tmp/go /tmp/begun")
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


async def test_a_command_that_was_running_and_does_not_end_is_stopped(hosts: tuple[SandboxHost, SandboxHost]):
    sandbox, shell = await opened(hosts[0], "mkfifo /tmp/begun; sleep 1000 & :")
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
    hosts: tuple[SandboxHost, SandboxHost],
):
    sandbox, shell = await opened(hosts[0], ":")
    state = shell.state
    await shell.run("echo seen; (exit 9)")
    _, shell = await adopted(hosts, sandbox, state)
    assert await shell.rest() is None or shell.state[0] == state[0] + 1
    result = await shell.run("echo next; (exit 3)")
    assert (result.exit_code, result.stdout.text()) == (3, "next\n")


@pytest.mark.parametrize("written", [b"", b"touch /tmp/part", b"touch /tmp/part\0", b"touch /tmp/part\0ru"])
async def test_a_command_that_was_written_in_part_is_not_run(hosts: tuple[SandboxHost, SandboxHost], written: bytes):
    sandbox, shell = await opened(hosts[0], ":")
    await shell._commands.write(written)
    _, shell = await adopted(hosts, sandbox, shell.state)
    assert await shell.rest() is None
    assert (await shell.run("ls /tmp/part; echo next")).stdout.text() == "next\n"


async def test_a_shell_that_ended_while_nobody_had_it_is_dead(hosts: tuple[SandboxHost, SandboxHost]):
    sandbox, shell = await opened(hosts[0], "mkfifo /tmp/go /tmp/begun")
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


async def test_a_shell_whose_end_the_earlier_owner_has_read_is_dead(hosts: tuple[SandboxHost, SandboxHost]):
    sandbox, shell = await opened(hosts[0])
    state = shell.state
    assert (await shell.run("exit 4")).exit_code == 4
    _, shell = await adopted(hosts, sandbox, state)
    result = await asyncio.wait_for(shell.rest(), 20)
    assert not shell.alive
    assert result
    assert result.exit_code in (4, 255)  # 255: unknown

"""An environment's process: its start, its end, and that it leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from goaly.environments.protocol import Disconnected, EnvironmentDied, EnvironmentTimeout, Unsent
from goaly.environments.server_process import Command, Server, ServerProcess

FAMILY = "sleep 1000 & near=$!; setsid sleep 1000 & echo $$ $near $!; wait"
"""A shell that writes its process id and those of two children, one of them in another session."""
OWNER = f"""
import asyncio, sys
from pathlib import Path
from goaly.environments.server_process import Command, ServerProcess

async def main():
    server = await ServerProcess.start(Command(arguments=["sh", "-c", {FAMILY!r}], log=Path(sys.argv[1])))
    print(server.pid, (await server.stdout.readline()).decode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


OWNER_OF_FOLDERS = """
import asyncio, sys
from asyncio.subprocess import PIPE
from goaly.environments.server_process import guarded

async def main():
    for folder in sys.argv[1:]:
        guard = await guarded(["sh", "-c", "echo; exec sleep 1000"], folder, stdout=PIPE)
        await guard.stdout.readline()
        print(guard.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def shell(script: str, tmp_path: Path, **options) -> Command:
    return Command(arguments=["sh", "-c", script], log=tmp_path / "log", **options)


async def family(tmp_path: Path) -> tuple[ServerProcess, list[int]]:
    server = await ServerProcess.start(shell(FAMILY, tmp_path))
    return server, [server.pid, *map(int, (await server.stdout.readline()).split())]


async def test_stopping_a_server_leaves_none_of_its_descendants(tmp_path, ends):
    """environments-1."""
    server, pids = await family(tmp_path)
    ends.watch(*pids)
    await server.stop()
    assert ends.wait(0)


async def test_descendants_end_when_the_command_ends(tmp_path, ends):
    """environments-1."""
    server, pids = await family(tmp_path)
    ends.watch(*pids)
    os.kill(pids[1], signal.SIGTERM)
    assert ends.wait()
    with pytest.raises(EnvironmentDied, match="signal SIGTERM"):
        await server.unless_dead(asyncio.sleep(1000))


def test_no_process_outlives_a_killed_owner(tmp_path, ends):
    """environments-1."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        ends.watch(*map(int, owner.stdout.readline().split()))
        owner.kill()
    assert ends.wait()


def test_the_folder_of_a_killed_owner_is_removed_unless_another_has_taken_its_path(tmp_path, ends):
    """environments-1."""
    own, taken = tmp_path / "own", tmp_path / "taken"
    for folder in (own, taken):
        (folder / "read-only").mkdir(parents=True)
        (folder / "read-only/file").touch()
        (folder / "read-only").chmod(0o500)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER_OF_FOLDERS, str(own), str(taken)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        ends.watch(*(int(owner.stdout.readline()) for _ in (own, taken)))
        taken.rename(tmp_path / "earlier")
        taken.mkdir()
        owner.kill()
    assert ends.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "taken"]


async def test_a_stopped_server_can_be_ended(tmp_path, ends):
    server, pids = await family(tmp_path)
    ends.watch(*pids)
    os.kill(pids[1], signal.SIGSTOP)
    await server.stop()
    assert ends.wait(0)


async def test_a_waiting_call_fails_at_once_with_exit_code_and_log(tmp_path):
    server = await ServerProcess.start(shell("read line; echo $line >&2; exit 3", tmp_path))
    waiting = asyncio.create_task(server.unless_dead(asyncio.sleep(1000)))
    server.stdin.write(b"out of memory\n")
    with pytest.raises(EnvironmentDied, match=r"(?s)exit code 3; .*/log ends with:\nout of memory"):
        await waiting
    with pytest.raises(EnvironmentDied, match="exit code 3"):
        await server.unless_dead(asyncio.sleep(0))


@pytest.mark.parametrize("error", [Disconnected, Unsent])
async def test_a_connection_that_fails_because_its_server_is_dying_is_a_death(tmp_path, error):
    server, pids = await family(tmp_path)

    async def work() -> None:
        os.kill(pids[1], signal.SIGKILL)
        raise error("connection refused")

    with pytest.raises(EnvironmentDied, match="signal SIGKILL"):
        await server.unless_dead(work())


async def test_a_server_that_ends_or_is_not_there_does_not_start(tmp_path):
    with pytest.raises(EnvironmentDied, match=r"(?s)exit code 4.*no game"):
        await ServerProcess.start(shell("echo no game; exit 4; {fd}", tmp_path))
    with pytest.raises(EnvironmentDied, match="cannot start nowhere/python"):
        await ServerProcess.start(Command(arguments=["nowhere/python", "{port}"], log=tmp_path / "log"))


async def test_a_server_that_does_not_answer_is_stopped_at_its_limit(tmp_path):
    command = shell(f"echo $$ > {tmp_path}/pid; sleep 1000 {{fd}}", tmp_path, start_seconds=0.3)
    with pytest.raises(EnvironmentTimeout, match=r"no answer within 0.3 s"):
        await ServerProcess.start(command)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_folder_and_variables_reach_the_command(tmp_path):
    command = shell("pwd; echo $LEVEL", tmp_path, folder=tmp_path, variables={"LEVEL": "hard"})
    server = await ServerProcess.start(command)
    assert (await server.stdout.read()).decode().split() == [str(tmp_path.resolve()), "hard"]
    await server.stop()


async def test_a_shared_server_starts_once_and_again_after_its_death(command):
    async with Server(command("counting.py", "{port}")) as server:
        first, same = await asyncio.gather(server.running(), server.running())
        assert first is same
        assert server.starts == 1
        os.kill(first.pid, signal.SIGTERM)
        with pytest.raises(EnvironmentDied):
            await first.unless_dead(asyncio.sleep(1000))
        assert (await server.running()).alive
        assert server.starts == 2

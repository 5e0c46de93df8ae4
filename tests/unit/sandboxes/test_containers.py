"""What is particular to sandboxes in containers: images, owners that are killed, snapshots, and what a daemon lacks."""

import asyncio
import json
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from goaly.sandboxes import containers
from goaly.sandboxes.container_check import checked
from goaly.sandboxes.container_images import Image
from goaly.sandboxes.container_request import SANDBOX
from goaly.sandboxes.container_stream import RelayedStream
from goaly.sandboxes.containers import SNAPSHOT, ContainerHost
from goaly.sandboxes.contract import Entry, SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.docker_api import DockerApi
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.settings import ContainerSettings

pytestmark = pytest.mark.slow

OWNER = """
import asyncio, pickle, sys
from goaly.sandboxes.containers import ContainerHost
from goaly.sandboxes.settings import ContainerSettings

async def main():
    host = await ContainerHost.open(ContainerSettings(socket=sys.argv[1]))
    sandbox = await host.start(pickle.loads(bytes.fromhex(sys.argv[2])))
    await sandbox.run("echo kept > /tmp/state; setsid sleep 1000 > /dev/null 2>&1 &")
    print(pickle.dumps(sandbox.ticket).hex(), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def backend() -> str:
    return "containers"


@pytest.fixture
async def api(daemon: tuple[str, str]) -> AsyncIterator[DockerApi]:
    async with DockerApi(Path(daemon[0])) as opened:
        yield opened


async def ours(api: DockerApi, label: str = SANDBOX) -> list[str]:
    """Names of our containers, or of images with a label."""
    query = {"all": 1, "filters": json.dumps({"label": [label]})}
    if label == SANDBOX:
        return [one["Names"][0][1:] for one in await api.ask("GET", "/containers/json", query=query)]
    return [tag for one in await api.ask("GET", "/images/json", query=query) for tag in one["RepoTags"] or [one["Id"]]]


async def an_image(api: DockerApi) -> str:
    """The name of an image of ours, with the usual programs."""
    tags = [tag for one in await api.ask("GET", "/images/json") for tag in one["RepoTags"] or ()]
    return next(tag for tag in tags if tag.startswith("localhost/goaly-image-"))


def left_by_a_killed_owner(socket: str, spec: SandboxSpec) -> containers.ContainerTicket:
    """The ticket of a sandbox that another process has started, which was killed then."""
    words = [sys.executable, "-c", OWNER, socket, pickle.dumps(spec).hex()]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return pickle.loads(bytes.fromhex(line))


async def test_a_container_whose_owner_was_killed_ends_after_its_time(
    daemon: tuple[str, str], spec: SandboxSpec, api: DockerApi
):
    ticket = await asyncio.to_thread(left_by_a_killed_owner, daemon[0], replace(spec, seconds_unowned=1))
    async with asyncio.timeout(30):
        await api.ask("POST", f"/containers/{ticket.name}/wait", query={"condition": "removed"})
    assert ticket.name not in await ours(api)
    host = await ContainerHost.open(ContainerSettings(socket=daemon[0]))
    with pytest.raises(SandboxDied, match=ticket.name):
        await host.adopt(ticket)
    await host.close()


async def test_who_adopts_a_container_finds_its_files_and_jobs(
    daemon: tuple[str, str], spec: SandboxSpec, host: SandboxHost
):
    ticket = await asyncio.to_thread(left_by_a_killed_owner, daemon[0], spec)
    adopted = await host.adopt(ticket)
    assert (await adopted.run("cat /tmp/state; ps -e | grep -c '[s]leep'")).stdout.text() == "kept\n1\n"
    await adopted.stop()


async def test_a_container_ends_at_its_time_to_live_which_begins_again_when_it_is_assigned(
    host: SandboxHost, spec: SandboxSpec
):
    for seconds, assigned in ((0.5, None), (1000.0, 0.5)):
        sandbox = await host.start(replace(spec, seconds_to_live=seconds))
        ended = asyncio.Event()
        sandbox.when_ended(ended.set)
        if assigned is not None:
            await sandbox.assign(replace(spec, seconds_to_live=assigned))
        async with asyncio.timeout(20):
            await ended.wait()
        with pytest.raises(SandboxDied):
            await sandbox.run("true")


async def test_a_folder_with_a_dockerfile_is_built_once_for_what_is_in_it(
    daemon: tuple[str, str], spec: SandboxSpec, host: SandboxHost, api: DockerApi, tmp_path: Path
):
    name = await an_image(api)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {name}\nENV GREETING=hello PATH=/opt/bin:/usr/bin:/bin\nCOPY tool /opt/bin/tool\nVOLUME /data\n"
    )
    (tmp_path / "tool").write_text("#!/bin/sh\necho $GREETING\n")
    (tmp_path / "tool").chmod(0o755)
    built = replace(spec, image=str(tmp_path))
    sandbox = await host.start(built)
    assert (await sandbox.run(["tool"])).stdout.text() == "hello\n"
    assert (await sandbox.run("tool; echo $HOME", env={"GREETING": "own"})).stdout.text() == "own\n/tmp\n"
    with pytest.raises(SandboxError, match=r"volumes.*/data"):
        await sandbox.snapshot()
    images = len(await api.ask("GET", "/images/json"))
    again = await ContainerHost.open(ContainerSettings(socket=daemon[0]))
    await again.prepare(str(tmp_path))
    assert len(await api.ask("GET", "/images/json")) == images
    (tmp_path / "tool").write_text("#!/bin/sh\necho changed\n")
    await again.close()
    assert (await (await host.start(built)).run(["tool"])).stdout.text() == "hello\n"  # one host, one state of a folder
    third = await ContainerHost.open(ContainerSettings(socket=daemon[0]))
    assert (await (await third.start(built)).run(["tool"])).stdout.text() == "changed\n"
    await third.close()


async def test_what_docker_save_wrote_is_an_image(
    daemon: tuple[str, str], spec: SandboxSpec, host: SandboxHost, api: DockerApi, sandbox: Sandbox, tmp_path: Path
):
    name = await an_image(api)
    saved = tmp_path / "saved.tar"
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(daemon[0])) as session:
        answer = await session.get(f"http://docker/images/{name}/get")
        saved.write_bytes(await answer.read())
    loaded = await host.start(replace(spec, image=str(saved)))
    assert (await loaded.run("echo lives")).stdout.text() == "lives\n"


@pytest.mark.parametrize(
    ("image", "match"),
    [
        ("/no/such/thing", "image='/no/such/thing' must be a tar or a folder with a Dockerfile"),
        ("{tmp}/text", "is no tar"),
        ("{tmp}/broken", "cannot be made.*no-such-instruction"),
        ("localhost:1/nothing", "image 'localhost:1/nothing' cannot be pulled"),
    ],
)
async def test_an_image_that_cannot_be_had_says_why(
    host: SandboxHost, spec: SandboxSpec, tmp_path: Path, image: str, match: str
):
    (tmp_path / "text").write_text("no tar")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "Dockerfile").write_text("FROM scratch\nno-such-instruction\n")
    with pytest.raises(SandboxUnavailable, match=re.compile(match, re.DOTALL | re.IGNORECASE)):
        await host.start(replace(spec, image=image.format(tmp=tmp_path)))


async def test_a_daemon_that_is_not_there_and_a_runtime_that_it_lacks_are_named(
    daemon: tuple[str, str], tmp_path: Path
):
    with pytest.raises(SandboxUnavailable, match=f"no daemon of containers answers at {tmp_path}/none"):
        await ContainerHost.open(ContainerSettings(socket=str(tmp_path / "none")))
    with pytest.raises(SandboxUnavailable, match=r"runtime='other' must be one that the daemon knows: .*runc"):
        await ContainerHost.open(ContainerSettings(socket=daemon[0], runtime="other"))


async def test_a_check_starts_a_container_and_names_what_is_not_bounded(daemon: tuple[str, str], tmp_path: Path):
    first, *more = await checked(ContainerSettings(socket=daemon[0]))
    assert re.match(r"yes: version \S+ with runc; it knows .*runc", first)
    assert any("number of its files" in line for line in more)
    assert await checked(ContainerSettings(socket=str(tmp_path / "none"))) == [
        f"no: no daemon of containers answers at {tmp_path}/none: No such file or directory"
    ]


async def test_a_forgotten_snapshot_goes_with_the_last_sandbox_that_needs_it(
    host: SandboxHost, sandbox: Sandbox, api: DockerApi
):
    await sandbox.run("echo one > /tmp/a")
    first = await sandbox.snapshot()
    fork = await host.start(sandbox.spec, origin=first)
    await fork.run("echo two >> /tmp/a")
    second = await fork.snapshot()
    await host.forget(first)
    assert (await fork.run("cat /tmp/a")).stdout.text() == "one\ntwo\n"
    await fork.stop()
    again = await host.start(sandbox.spec, origin=second)
    assert (await again.run("cat /tmp/a")).stdout.text() == "one\ntwo\n"
    assert second.layers[0] in await ours(api, SNAPSHOT)
    await host.forget(second)
    await again.stop()
    assert await ours(api, SNAPSHOT) == []


async def test_what_killed_processes_left_at_the_daemon_is_removed_when_it_is_old(
    daemon: tuple[str, str], api: DockerApi, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    name = await an_image(api)
    wanted = {"Image": name, "Cmd": ["true"], "Labels": {SANDBOX: "1"}}
    await api.ask("POST", "/containers/create", query={"name": "never-started"}, record=wanted)
    leaver = await ContainerHost.open(ContainerSettings(socket=daemon[0]))
    left = await (await leaver.start(replace(sandbox.spec, seconds_unowned=1))).snapshot()
    await leaver.leave()

    async def opened_and_closed() -> None:
        await (await ContainerHost.open(ContainerSettings(socket=daemon[0]))).close()

    await opened_and_closed()
    assert "never-started" in await ours(api)
    assert left.layers[0] in await ours(api, SNAPSHOT)
    later = time.time() + 3 * 24 * 3600
    monkeypatch.setattr(containers.time, "time", lambda: later)
    await opened_and_closed()
    assert "never-started" not in await ours(api)
    assert await ours(api, SNAPSHOT) == []
    assert (await sandbox.run("true")).ok


async def test_a_start_that_is_cancelled_leaves_no_container(
    host: SandboxHost, spec: SandboxSpec, api: DockerApi, sandbox: Sandbox
):
    before = set(await ours(api))
    for delay in (0.0, 0.03, 0.1):
        start = asyncio.create_task(host.start(spec))
        await asyncio.wait({start}, timeout=delay)
        if start.cancel():
            with pytest.raises(asyncio.CancelledError):
                await start
        else:
            await (await start).stop()
        assert set(await ours(api)) <= before


async def test_at_most_parallel_starts_are_begun_at_once(
    daemon: tuple[str, str], spec: SandboxSpec, monkeypatch: pytest.MonkeyPatch
):
    running, most = 0, 0
    run = ContainerHost._run

    async def counted(host: ContainerHost, name: str, spec: SandboxSpec, image: Image) -> containers.ContainerSandbox:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await run(host, name, spec, image)
        finally:
            running -= 1

    monkeypatch.setattr(ContainerHost, "_run", counted)
    host = await ContainerHost.open(ContainerSettings(socket=daemon[0], parallel_starts=2))
    started = await asyncio.gather(*(host.start(spec) for _ in range(4)))
    assert most == 2
    assert [(await one.run("echo lives")).ok for one in started] == [True] * 4
    await host.close()


async def test_output_of_a_large_command_is_complete_when_it_ends(sandbox: Sandbox):
    for _ in range(5):
        result = await sandbox.run(
            "head -c 3000000 /dev/zero; echo last >&2; head -c 1 /dev/zero", output_bytes=1 << 23
        )
        assert (len(result.stdout.head + result.stdout.tail), result.stderr.text()) == (3_000_001, "last\n")


async def test_what_a_command_wrote_comes_before_its_end_even_where_its_output_has_to_wait(sandbox: Sandbox):
    process = await sandbox.start(["head", "-c", "300000", "/dev/zero"])
    assert isinstance(process.stdout, RelayedStream)
    process.stdout.pause()
    await sandbox.run("while ps -e | grep -q '[h]ead'; do :; done")
    assert process.stdout.total < 300_000
    assert not process.ended.done()
    process.stdout.resume()
    assert await process.ended == 0
    assert process.stdout.total == 300_000
    process.close()


async def test_a_command_that_does_not_read_holds_up_no_other(sandbox: Sandbox):
    silent = await sandbox.start("sleep 1000")
    writing = asyncio.create_task(silent.write(bytes(1 << 20)))
    flooding = await sandbox.start("yes")
    assert (await sandbox.run("echo lives")).stdout.text() == "lives\n"
    assert not writing.done()
    for process in (silent, flooding):
        await process.kill()
        await process.ended
        process.close()
    await writing


async def test_commands_cannot_be_the_first_processs_user_or_speak_with_it(
    host: SandboxHost, sandbox: Sandbox, spec: SandboxSpec
):
    with pytest.raises(SandboxUnavailable, match="user=65533 is reserved"):
        await host.start(replace(spec, user=65533))
    result = await sandbox.run("true", user=65533)
    assert (result.exit_code, result.stderr.text()) == (126, "user 65533 is reserved\n")
    with pytest.raises(PermissionError, match="reserved"):
        await sandbox.upload([Entry(path="x")], "/tmp", user=65533)
    speak = """
import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect("\\0goaly")
s.send(b"N" + bytes(4))
print("OUT" if s.recv(100) else "refused")
"""
    for user in (0, 1000):
        result = await sandbox.run(["python3", "-c", speak], user=user)
        assert "OUT" not in result.stdout.text()
        assert "refused" in result.stdout.text() or "Error" in result.stderr.text()

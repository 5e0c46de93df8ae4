"""Commands, files, shells and snapshots of sandboxes, in real ones of this host and by way of a server."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from goaly.sandboxes.command import Stream
from goaly.sandboxes.contract import Entry, Limit, SandboxDied, SandboxSpec, SandboxUnavailable
from goaly.sandboxes.files import folder_entries, write_folder
from goaly.sandboxes.sandbox import Sandbox, SandboxHost
from goaly.sandboxes.shell import Shell
from tests.unit.sandboxes.conftest import LOCAL, first_process


@pytest.fixture(params=[*LOCAL, "remote"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_a_failing_command_is_a_result_with_both_streams(sandbox: Sandbox):
    result = await sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout.text(), result.stderr.text(), result.limit) == (3, "out\n", "err\n", None)
    missing = await sandbox.run(["no-such-program"])
    assert missing.exit_code in (126, 127)
    assert "no-such-program" in missing.stderr.text()
    assert (await sandbox.run("pwd", cwd="/no/such/folder")).exit_code == 126


async def test_input_variables_folder_and_user_reach_the_command(sandbox: Sandbox):
    assert (await sandbox.run("cat", stdin=b"\0\xff" * 200_000, output_bytes=1 << 20)).stdout.head[:2] == b"\0\xff"
    said = await sandbox.run('echo "$A $PWD"; id -u', cwd="/usr", env={"A": "b c"}, user=1234)
    assert said.stdout.text() == "b c /usr\n1234\n"


async def test_files_of_the_hosts_root_belong_to_the_sandboxes_root(host: SandboxHost, sandbox: Sandbox):
    if os.geteuid() == 0:
        assert (await sandbox.run("stat -c %u:%g /usr/bin/env")).stdout.text() == "0:0\n"
    assert (await sandbox.run("echo x > /usr/bin/env", user=0)).ok
    assert (await sandbox.run("wc -c < /usr/bin/env")).stdout.text() == "2\n"
    assert (await (await host.start(sandbox.spec)).run("env")).ok


async def test_of_long_output_head_and_tail_are_kept(sandbox: Sandbox):
    output = (await sandbox.run("seq 1 100000", output_bytes=100)).stdout
    assert output.head.startswith(b"1\n2\n")
    assert output.tail.endswith(b"99999\n100000\n")
    assert len(output.head) + len(output.tail) + output.omitted == len("".join(f"{n}\n" for n in range(1, 100_001)))
    assert f"{output.omitted} bytes omitted" in output.text()


async def test_a_command_that_exceeds_its_time_ends_with_its_children(sandbox: Sandbox):
    result = await sandbox.run("sleep 1000 & echo begun; sleep 1000", seconds=0.2)
    assert (result.limit, result.exit_code, result.stdout.text()) == (Limit.TIME, 137, "begun\n")
    assert (await sandbox.run("ps -e | grep -c '[s]leep'")).stdout.text() == "0\n"


async def test_a_cancelled_caller_ends_the_command(sandbox: Sandbox):
    call = asyncio.create_task(sandbox.run("touch /tmp/begun; sleep 1000"))
    while not (await sandbox.run("test -e /tmp/begun")).ok:
        assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await sandbox.run("ps -e | grep -c '[s]leep'")).stdout.text() == "0\n"


async def test_commands_take_signals_as_elsewhere(sandbox: Sandbox):
    assert (await sandbox.run("timeout 0.1 sleep 1000", seconds=20)).exit_code == 124
    flood = await sandbox.run(["bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}"])
    assert (flood.stdout.text(), flood.stderr.text()) == ("y\n141\n", "")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = await sandbox.start("exec sleep 1000")
        await process.kill(number)
        assert await process.ended == -number
        process.close()


async def test_many_commands_run_at_once(sandbox: Sandbox):
    results = await asyncio.gather(*(sandbox.run(f"echo {n}") for n in range(40)))
    assert [result.stdout.text() for result in results] == [f"{n}\n" for n in range(40)]


async def test_an_argument_list_that_is_too_long_is_refused_and_the_sandbox_lives(sandbox: Sandbox):
    with pytest.raises(ValueError, match="bytes"):
        await sandbox.run(["echo", "x" * 300_000])
    assert (await sandbox.run("true")).ok


async def test_long_commands_are_written_to_and_read_as_they_run(sandbox: Sandbox):
    process = await sandbox.start("while read line; do echo got $line; done")
    came: asyncio.Queue[bytes] = asyncio.Queue()
    process.stdout.on_bytes = came.put_nowait
    for word in (b"one\n", b"two\n"):
        await process.write(word)
        assert await asyncio.wait_for(came.get(), 10) == b"got " + word
    await process.kill()
    assert await process.ended == -9
    process.close()


def test_a_reader_of_an_output_gets_what_came_before_it_too():
    stream, came = Stream(100), []
    stream.feed(b"first ")
    stream.on_bytes = came.append
    stream.feed(b"second")
    assert came == [b"first ", b"second"]
    assert stream.taken().text() == "first second"


async def test_files_go_in_and_out_with_modes_and_links(sandbox: Sandbox, tmp_path: Path):
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "run.sh").write_text("echo ran")
    (source / "deep" / "er" / "run.sh").chmod(0o755)
    (source / "data").write_bytes(os.urandom(300_000))
    (source / "link").symlink_to("deep/er/run.sh")
    await sandbox.upload(folder_entries(source), "/tmp/copy")
    assert (
        await sandbox.run("sh /tmp/copy/link; /tmp/copy/deep/er/run.sh; stat -c %a /tmp/copy/deep/er/run.sh")
    ).stdout.text() == "ran\nran\n755\n"
    entries = {entry.path: entry for entry in await sandbox.download("/tmp/copy")}
    assert entries["data"].contents == (source / "data").read_bytes()
    assert entries["link"].kind == "link"
    assert entries["link"].contents == b"deep/er/run.sh"
    assert write_folder(list(entries.values()), tmp_path / "back") == ["link"]
    assert (tmp_path / "back" / "deep" / "er" / "run.sh").read_text() == "echo ran"


async def test_reading_what_is_no_file_or_too_large_raises(sandbox: Sandbox):
    await sandbox.write("/tmp/f", b"x" * 1000)
    assert await sandbox.read("/tmp/f") == b"x" * 1000
    for path, error in (
        ("/tmp/none", FileNotFoundError),
        ("/tmp", IsADirectoryError),
        ("/dev/zero", IsADirectoryError),
    ):
        with pytest.raises(error):
            await sandbox.read(path)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        await sandbox.read("/tmp/f", most_bytes=100)
    with pytest.raises(ValueError, match="relative path"):
        await sandbox.upload([Entry(path="../out", contents=b"")], "/tmp")


async def test_a_shell_keeps_folder_variables_functions_and_jobs(sandbox: Sandbox):
    shell = await Shell.open(sandbox)
    for command, output in [
        ("cd /usr; x=5; f() { echo f$1; }", ""),
        ("pwd; echo $x; f 3", "/usr\n5\nf3\n"),
        ("sleep 1000 & echo begun", "begun\n"),
        ("cat; echo end", "end\n"),
        ("printf 'no newline'", "no newline"),
        ("jobs -r | wc -l", "1\n"),
    ]:
        assert (await shell.run(command)).stdout.text() == output
    assert (await shell.run("false")).exit_code == 1
    assert (await shell.run("if")).exit_code == 2
    await shell.close()


async def test_a_shell_survives_a_command_that_exceeds_its_time_and_so_do_its_jobs(sandbox: Sandbox):
    shell = await Shell.open(sandbox)
    await shell.run("sleep 777 & x=5")
    late = await shell.run("echo begun; sleep 1000 | cat", seconds=0.3)
    assert (late.limit, late.stdout.text()) == (Limit.TIME, "begun\n")
    assert (await shell.run("echo $x; ps -eo args | grep '[s]leep'")).stdout.text() == "5\nsleep 777\n"


async def test_a_job_that_writes_without_end_does_not_keep_the_shell(sandbox: Sandbox):
    shell = await Shell.open(sandbox, output_bytes=1000)
    assert (await shell.run("yes & echo begun")).exit_code == 0
    flood = (await shell.run("sleep 0.1")).stdout
    assert flood.omitted
    assert len(flood.head) + len(flood.tail) == 1000
    await shell.close()


async def test_a_shell_that_ends_says_so(sandbox: Sandbox):
    shell = await Shell.open(sandbox)
    assert (await shell.run("exit 7")).exit_code == 7
    assert not shell.alive
    with pytest.raises(SandboxDied):
        await shell.run("true")
    assert (await sandbox.run("true")).ok


async def test_forks_of_a_snapshot_begin_alike_and_do_not_see_each_other(host: SandboxHost, sandbox: Sandbox):
    await sandbox.run("mkdir /tmp/d; echo one > /tmp/d/a; echo gone > /tmp/d/b; rm /tmp/d/b")
    first = await sandbox.snapshot()
    await sandbox.run("echo two >> /tmp/d/a; mkdir /tmp/later")
    second = await sandbox.snapshot()
    forks = await asyncio.gather(*(host.start(sandbox.spec, origin=snapshot) for snapshot in (first, first, second)))
    await forks[0].run("echo own >> /tmp/d/a")
    seen = [(await fork.run("cat /tmp/d/*; ls /tmp/d")).stdout.text() for fork in (*forks, sandbox)]
    assert seen == ["one\nown\na\n", "one\na\n", "one\ntwo\na\n", "one\ntwo\na\n"]
    await sandbox.stop()
    assert (await forks[1].run("cat /tmp/d/a")).stdout.text() == "one\n"
    await host.forget(first)
    assert (await forks[1].run("cat /tmp/d/a")).stdout.text() == "one\n"


async def test_a_snapshot_waits_for_no_process_and_refuses_while_one_runs(sandbox: Sandbox):
    process = await sandbox.start("sleep 1000")
    with pytest.raises(OSError, match="still running"):
        await sandbox.snapshot()
    await process.kill()
    await process.ended
    await sandbox.snapshot()
    assert (await sandbox.run("echo works > /tmp/x; cat /tmp/x")).stdout.text() == "works\n"


async def test_a_sandbox_that_died_raises_and_its_commands_do_too(host: SandboxHost, sandbox: Sandbox):
    running = asyncio.create_task(sandbox.run("sleep 1000"))
    await sandbox.run("true")
    os.kill(await first_process(sandbox), 9)
    with pytest.raises(SandboxDied):
        await running
    assert not sandbox.alive()
    with pytest.raises(SandboxDied):
        await sandbox.run("true")
    await sandbox.stop()


async def test_what_a_backend_cannot_start_is_refused(
    host: SandboxHost, backend: str, spec: SandboxSpec, tmp_path: Path
):
    with pytest.raises(SandboxUnavailable, match="none"):
        await host.start(replace(spec, root=tmp_path / "none"))
    match = r"starts images.*image=None.*use the backend namespaces"
    if backend != "containers":
        match, spec = r"no images.*debian:12.*use the backend containers", replace(spec, image="debian:12")
    else:
        spec = replace(spec, image=None)
    with pytest.raises(SandboxUnavailable, match=match):
        await host.start(spec)


async def test_the_end_of_a_sandbox_is_told_once_whether_it_died_or_was_stopped(host: SandboxHost, spec: SandboxSpec):
    ends = []
    for stop in (True, False):
        sandbox = await host.start(spec)
        told = asyncio.Event()
        sandbox.when_ended(lambda told=told: (ends.append(1), told.set()))
        if stop:
            await sandbox.stop()
        else:
            os.kill(await first_process(sandbox), signal.SIGKILL)
        async with asyncio.timeout(20):
            await told.wait()
    await host.close()
    assert ends == [1, 1]


async def test_a_shells_script_brings_another_one_into_its_state(sandbox: Sandbox):
    first, second = await Shell.open(sandbox), await Shell.open(sandbox)
    await first.run("cd /usr; x='a  b'; y=$'one\\ntwo'; export z=3; a=(1 '2 3'); f() { echo f$x; }; shopt -s extglob")
    await second.run(await first.script())
    seen = await second.run("""echo "$PWD,$x,$y,${a[1]}"; f; sh -c 'echo $z'; shopt extglob | grep -o on""")
    assert seen.stdout.text() == "/usr,a  b,one\ntwo,2 3\nfa b\n3\non\n"
    assert seen.stderr.text() == ""


async def test_several_callers_may_stop_a_sandbox_at_once(sandbox: Sandbox):
    running = asyncio.create_task(sandbox.run("sleep 1000"))
    await asyncio.gather(sandbox.stop(), sandbox.stop(), sandbox.stop())
    with pytest.raises(SandboxDied):
        await running
